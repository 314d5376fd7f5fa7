// What a handler asks of a launcher: kernels, each over a number of teams. Every library is built with one launcher, which defines
// Context (what it needs of XLA) and run(), for launches of which each may read what those before it wrote.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

// A kernel's template arguments, in the order it declares them; the launcher adds the shape (V, R, SG, TEAMS).
enum class Argument : uint8_t { False, True, Float, Bfloat, Half, Ones, Halves, Adjacent, Apart };

constexpr int most_launches = 2;  // of one call

inline Argument flag(bool value) { return value ? Argument::True : Argument::False; }
inline int bytes_of(Argument storage) { return storage == Argument::Float ? 4 : 2; }

struct Launch {
  const char* kernel;
  Argument variant[8] = {};
  int variant_size = 0;
  void* buffers[16];          // in the order of [[buffer(n)]]; the params come last
  size_t buffer_bytes[16];
  bool written[16];
  bool fresh[16];             // holds nothing yet
  int buffer_count = 0;
  uint32_t teams;             // rows, or blocks of rows
  uint32_t width;             // elements that a team shares
  int element_bytes;          // of each of them
  bool heads = false;         // they are heads, which are narrower than rows
  bool aligned = true;        // rows of whole packs start at multiples of a pack
  bool streams = false;       // it keeps little, and should have much on its way
  uint32_t kept;              // rows that a team keeps between its sweeps, where that takes memory of its own
  size_t bytes;               // that one team moves
  const void* params;
  size_t params_bytes;

  explicit Launch(const char* name) : kernel(name) {}
  template <typename... A>
  void specialize(A... arguments) { ((variant[variant_size++] = arguments), ...); }
  // `teams` teams, each sharing `at.width` elements, moving `bytes` and keeping `rows_kept` rows.
  template <typename Rows, typename Params>
  void over(uint32_t count, const Rows& at, size_t bytes_a_team, uint32_t rows_kept, const Params& p) {
    teams = count;
    width = at.width;
    element_bytes = bytes_of(at.storage);
    bytes = bytes_a_team;
    kept = rows_kept;
    params = &p;
    params_bytes = sizeof(p);
  }
  void bind(const void* data, size_t bytes, bool write, bool update = false) {
    buffers[buffer_count] = const_cast<void*>(data);
    buffer_bytes[buffer_count] = bytes;
    fresh[buffer_count] = write && !update;
    written[buffer_count++] = write;
  }
};

// The instantiation's name, as MSL text and messages spell it.
inline std::string spelled(const Launch& launch) {
  static const char* const words[] = {"false", "true", "float", "bfloat", "half", "ones", "halves", "adjacent", "apart"};
  std::string name = std::string(launch.kernel) + "<";
  for (int i = 0; i < launch.variant_size; ++i) name += (i ? ", " : "") + std::string(words[int(launch.variant[i])]);
  return name + ">";
}
