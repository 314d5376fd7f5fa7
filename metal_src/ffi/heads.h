// What the handlers of heads share.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "ffi/handler.h"
#include "launch/shape.h"

enum Style { neox, interleaved, proportional };

// [..., tokens, heads, width], and how many tokens one sequence has.
struct Heads {
  uint32_t tokens, sequence, heads, width;
  Argument storage;
};

inline ffi::Error heads_of(const char* op, const char* name, const ffi::AnyBuffer& x, Heads* at) {
  const auto shape = x.dimensions();
  if (!storage_of(x.element_type(), &at->storage)) return refuse(std::string(op) + ": " + name + " is of a dtype that has no kernel");
  if (shape.size() < 3 || shape.back() == 0) return refuse(std::string(op) + ": " + name + " needs axes of tokens, heads and at least one channel");
  const uint64_t width = shape.back(), heads = shape[shape.size() - 2], sequence = shape[shape.size() - 3];
  uint64_t tokens = 1;
  for (size_t axis = 0; axis + 2 < shape.size(); ++axis) tokens *= shape[axis];
  if (width >> 31 || heads >> 31 || sequence >> 31 || tokens >> 31)
    return refuse(std::string(op) + ": " + name + " has an axis of more than 2^31 elements");
  at->tokens = uint32_t(tokens);
  at->sequence = uint32_t(sequence);
  at->heads = uint32_t(heads);
  at->width = uint32_t(width);
  return ffi::Error::Success();
}

// The heads in the columns from `start` on of x, a row of each token.
inline ffi::Error columns_of(const char* op, const char* name, const In& x, int64_t start, uint64_t heads, Argument storage,
                             const HeadNormRopeParams& p, uint32_t* stride, uint32_t* first) {
  Argument type;
  const uint64_t wanted = heads * p.width, columns = p.tokens ? x.element_count() / p.tokens : wanted + start;
  if (!storage_of(x.element_type(), &type) || type != storage || columns * p.tokens != x.element_count())
    return refuse(std::string(op) + ": " + name + " must have the dtype of the other heads, and as many tokens");
  if (columns >> 31 || start < 0 || start + wanted > columns)
    return refuse(std::string(op) + ": " + name + " has " + std::to_string(columns) + " columns, and " + std::to_string(wanted) +
                  " were wanted from column " + std::to_string(start));
  const int v = head_shape(p.width, bytes_of(storage), launcher::threads_a_team).v;
  if (start % v || columns % v)
    return refuse(std::string(op) + ": " + name + "'s heads must start at multiples of " + std::to_string(v) + " columns");
  *stride = uint32_t(columns);
  *first = uint32_t(start);
  return ffi::Error::Success();
}

// Heads side by side, token after token.
inline HeadNormRopeParams params_of(const Heads& at) {
  HeadNormRopeParams p{at.tokens, at.sequence, at.heads, 0, at.width};
  p.x_stride = at.heads * at.width;
  return p;
}

// k beside x, and likewise.
inline ffi::Error add_k(const char* op, const In& k, const Heads& at, HeadNormRopeParams* p) {
  Heads of_k;
  RETURN_IF_ERROR(heads_of(op, "k", k, &of_k));
  if (of_k.storage != at.storage || of_k.width != at.width || of_k.tokens != at.tokens)
    return refuse(std::string(op) + ": k and its one result must have x's dtype, tokens and width");
  p->k_heads = of_k.heads;
  p->k_stride = of_k.heads * of_k.width;
  return ffi::Error::Success();
}

// Columns of one projection, whose heads are like q and k [..., tokens, heads, width].
inline ffi::Error packed_of(const char* op, const In& projection, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, int64_t q_start, int64_t k_start,
                            Heads* at, HeadNormRopeParams* p) {
  RETURN_IF_ERROR(heads_of(op, "q", q, at));
  *p = params_of(*at);
  RETURN_IF_ERROR(add_k(op, k, *at, p));
  RETURN_IF_ERROR(columns_of(op, "the projection", projection, q_start, p->heads, at->storage, *p, &p->x_stride, &p->x_start));
  return columns_of(op, "the projection", projection, k_start, p->k_heads, at->storage, *p, &p->k_stride, &p->k_start);
}

inline ffi::Error positions_of(const char* op, const In& positions, const HeadNormRopeParams& p) {
  RETURN_IF_ERROR(expect(op, "positions", positions.element_count(), p.tokens));
  return positions.element_type() == ffi::DataType::S32 ? ffi::Error::Success() : refuse(std::string(op) + ": positions must be int32");
}

// What the angles are, and which channels they turn.
inline ffi::Error rotation_of(const char* op, const In& angles, int32_t style, bool suffix, HeadNormRopeParams* p) {
  const auto shape = angles.dimensions();
  p->table = angles.element_type() == ffi::DataType::F32;
  const bool right = shape.size() == 2 && (p->table ? shape[1] % 2 == 0 : angles.element_type() == ffi::DataType::U32 && shape[1] == 2);
  if (!right) return refuse(std::string(op) + ": the angles must be turns, uint32 [pairs, 2], or a table, float32 [positions, 2 pairs]");
  const uint64_t rows = p->table ? shape[0] : 0, pairs = p->table ? shape[1] / 2 : shape[0];
  if (style < neox || style > proportional || (style == proportional && suffix)) return refuse(std::string(op) + ": no such pairs");
  if (2 * pairs > p->width) return refuse(std::string(op) + ": more pairs than channels for them");
  p->table_rows = uint32_t(std::min<uint64_t>(rows, 1u << 31));  // a position is less
  p->pairs = uint32_t(pairs);
  p->first = suffix && pairs ? p->width - 2 * p->pairs : 0;
  p->interleaved = style == interleaved;
  p->distance = style == interleaved ? 1 : style == neox && pairs ? p->pairs : p->width / 2;
  return ffi::Error::Success();
}

// Where the threads that share a head find the two channels of a pair. Halves: the head is all pairs, or blocks as large as its pairs, a power
// of two of packs; not of 4-byte elements, for what a thread has of a head is also the order in which it is summed.
inline Argument pairs_of(const HeadNormRopeParams& p, const HeadShape& shape, Argument storage) {
  if (p.interleaved) return shape.lanes == 1 || shape.v % 2 == 0 ? Argument::Adjacent : Argument::Apart;
  const uint32_t packs = p.distance / shape.v;
  const bool in_blocks = bytes_of(storage) == 2 && p.distance % shape.v == 0 && packs && (packs & (packs - 1)) == 0 &&
                         p.width % (2 * p.distance) == 0 && p.first % (2 * p.distance) == 0;
  return shape.halves && (2 * p.distance == p.width || in_blocks) ? Argument::Halves : Argument::Apart;
}

// The scales of x and of k, if there are any.
inline ffi::Error scales_of(const char* op, Rest& rest, Argument storage, bool has_k, In* x_scale, In* k_scale, HeadNormRopeParams* p) {
  if (rest.empty()) return ffi::Error::Success();
  Argument type;
  RETURN_IF_ERROR(rest.take("the scale", p->width, x_scale));
  if (!storage_of(x_scale->element_type(), &type) || (type != Argument::Float && type != storage))
    return refuse(std::string(op) + ": the scale must be float32 or of x's dtype");
  p->scale = type == Argument::Float ? float_scale : storage_scale;
  *k_scale = *x_scale;
  if (has_k) RETURN_IF_ERROR(rest.take("the scale of k", p->width, k_scale));
  if (k_scale->element_type() != x_scale->element_type()) return refuse(std::string(op) + ": the two scales must be of one dtype");
  return ffi::Error::Success();
}

inline uint32_t walks_of(uint32_t heads, const HeadNormRopeParams& p) { return (heads + p.at_once - 1) / p.at_once; }

// How a team shares a head, and how often it walks to take all of a token's.
inline HeadShape share_heads(Argument storage, HeadNormRopeParams* p) {
  const HeadShape shape = head_shape(p->width, bytes_of(storage), launcher::threads_a_team);
  p->lanes = shape.lanes;
  p->at_once = launcher::threads_a_team / shape.lanes;
  p->x_walks = walks_of(p->heads, *p);
  p->k_walks = walks_of(p->k_heads, *p);
  return shape;
}

// The kernel's variant, and how its teams share each token's heads, of which there are these counts of one kind each.
inline Launch launch_of_heads(const char* kernel, Argument storage, bool multiply_before_cast, bool round_before_rope,
                              std::initializer_list<uint32_t> counts, HeadNormRopeParams* p, uint32_t* teams) {
  const HeadShape shape = share_heads(storage, p);
  uint32_t walks = 0;
  for (uint32_t count : counts) walks += walks_of(count, *p);
  p->parts = std::max(std::min(walks, launcher::enough_teams / std::max(p->tokens, 1u)), 1u);
  *teams = walks ? p->tokens * p->parts : 0;
  const bool rounds_y = storage != Argument::Float, in_t = rounds_y && !multiply_before_cast;
  Launch launch(kernel);
  launch.specialize(storage, flag(in_t), flag(in_t || (rounds_y && round_before_rope)), pairs_of(*p, shape, storage));
  launch.heads = true;
  return launch;
}
