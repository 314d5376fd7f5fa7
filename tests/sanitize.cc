// sanitize LIBRARY CALLS: makes every custom call of a list, twice, as XLA would, on arrays of their own. sanitize.py writes the list, one
// call a line: the handler, then in:DTYPE:SHAPE: and out:DTYPE:SHAPE:[the operand whose memory it is], and attr:NAME:TYPE:VALUE by name.
// Integers are small the first time, and the second time whatever a 32-bit integer can be. Results start as NaN, and none may be left.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

[[noreturn]] void fail(const std::string& call, const std::string& why) {
  std::fprintf(stderr, "%s\n%s\n", call.c_str(), why.c_str());
  std::exit(1);
}

void expect(const std::string& call, cudaError_t error) {
  if (error != cudaSuccess) fail(call, cudaGetErrorString(error));
}

struct Dtype {
  const char* name;
  XLA_FFI_DataType code;
  size_t bytes;
};
constexpr Dtype dtypes[] = {{"f32", XLA_FFI_DataType_F32, 4}, {"bf16", XLA_FFI_DataType_BF16, 2}, {"f16", XLA_FFI_DataType_F16, 2},
                            {"i32", XLA_FFI_DataType_S32, 4}, {"ui32", XLA_FFI_DataType_U32, 4}, {"i64", XLA_FFI_DataType_S64, 8},
                            {"i1", XLA_FFI_DataType_PRED, 1}};

const Dtype& dtype_of(const std::string& name) {
  for (const Dtype& dtype : dtypes)
    if (name == dtype.name) return dtype;
  fail(name, "is no dtype of this program");
}

struct Array {
  const Dtype* dtype;
  std::vector<int64_t> dims;
  size_t bytes;
  int alias = -1;  // the operand whose memory it is
  void* data = nullptr;
  XLA_FFI_Buffer buffer{};

  XLA_FFI_Buffer* described() {
    buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype->code, data, int64_t(dims.size()), dims.data()};
    return &buffer;
  }
};

struct Attribute {
  std::string name;
  XLA_FFI_ByteSpan span{};
  XLA_FFI_Scalar scalar{};
  union {
    bool b;
    int32_t i;
    int64_t l;
    float f;
  } value;
};

struct Call {
  std::string handler;
  std::vector<std::unique_ptr<Array>> in, out;
  std::vector<std::unique_ptr<Attribute>> attributes;
};

Call parse(const std::string& line) {
  Call call;
  std::istringstream words(line);
  words >> call.handler;
  for (std::string word; words >> word;) {
    std::string part[4], dim;
    std::istringstream parts(word);
    for (std::string& p : part) std::getline(parts, p, ':');
    if (part[0] == "attr") {
      auto a = std::make_unique<Attribute>();
      a->name = part[1];
      a->span = {a->name.data(), a->name.size()};
      a->scalar = {dtype_of(part[2]).code, &a->value};
      if (part[2] == "i1") a->value.b = part[3] == "true";
      else if (part[2] == "f32") a->value.f = std::stof(part[3]);
      else if (part[2] == "i32") a->value.i = std::stoi(part[3]);
      else a->value.l = std::stoll(part[3]);
      call.attributes.push_back(std::move(a));
      continue;
    }
    auto array = std::make_unique<Array>();
    array->dtype = &dtype_of(part[1]);
    array->bytes = array->dtype->bytes;
    if (array->bytes != 2 && array->bytes != 4) fail(line, "arrays here have elements of 2 or 4 bytes");
    for (std::istringstream shape(part[2]); std::getline(shape, dim, 'x');) {
      array->dims.push_back(std::stoll(dim));
      array->bytes *= array->dims.back();
    }
    if (!part[3].empty()) array->alias = std::stoi(part[3]);
    (part[0] == "in" ? call.in : call.out).push_back(std::move(array));
  }
  return call;
}

std::vector<unsigned char> drawn(const Array& array, bool any_integer, std::mt19937& random) {
  std::vector<unsigned char> bytes(array.bytes);
  const size_t size = array.dtype->bytes;
  const bool integer = array.dtype->code == XLA_FFI_DataType_S32;
  for (size_t i = 0; i < array.bytes; i += size) {
    // +-1 to 2 in float32, in bfloat16 its upper half; as a float16, that is +-1.9
    uint32_t bits = 0x3f800000 | (random() & 0x807fffff);
    if (integer) bits = any_integer ? uint32_t(int32_t(random()) >> random() % 32) : 3 * (i / size) % 7;
    std::memcpy(&bytes[i], reinterpret_cast<const char*>(&bits) + 4 - size, size);
  }
  return bytes;
}

// Memory of exactly so many bytes, kept for the next call that wants as many: to allocate takes longer than to launch.
std::multimap<size_t, void*> spare;

void* allocated(const std::string& call, size_t bytes) {
  void* data = nullptr;
  if (const auto found = spare.find(bytes); found != spare.end()) {
    data = found->second;
    spare.erase(found);
  } else if (bytes) {
    expect(call, cudaMalloc(&data, bytes));
  }
  return data;
}

XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

void make(const std::string& line, Call& call, XLA_FFI_Handler* handler, bool any_integer, std::mt19937& random) {
  for (auto& array : call.in) {
    const std::vector<unsigned char> values = drawn(*array, any_integer, random);
    array->data = allocated(line, array->bytes);
    expect(line, cudaMemcpy(array->data, values.data(), array->bytes, cudaMemcpyHostToDevice));
  }
  for (auto& array : call.out) {
    array->data = array->alias < 0 ? allocated(line, array->bytes) : call.in[array->alias]->data;
    if (array->alias < 0) expect(line, cudaMemset(array->data, 0xff, array->bytes));
  }

  std::vector<XLA_FFI_ArgType> arg_types(call.in.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(call.out.size(), XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> attribute_types(call.attributes.size(), XLA_FFI_AttrType_SCALAR);
  std::vector<void*> args, rets, attributes;
  std::vector<XLA_FFI_ByteSpan*> names;
  for (auto& array : call.in) args.push_back(array->described());
  for (auto& array : call.out) rets.push_back(array->described());
  for (auto& a : call.attributes) names.push_back(&a->span), attributes.push_back(&a->scalar);
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create;
  api.XLA_FFI_Stream_Get = stream_of;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(names.size()), attribute_types.data(), names.data(), attributes.data()};
  if (const XLA_FFI_Error* error = handler(&frame)) fail(line, error->message);
  expect(line, cudaDeviceSynchronize());

  for (auto& array : call.out) {
    if (array->alias >= 0) continue;
    std::vector<unsigned char> got(array->bytes);
    expect(line, cudaMemcpy(got.data(), array->data, array->bytes, cudaMemcpyDeviceToHost));
    const std::vector<unsigned char> unwritten(array->dtype->bytes, 0xff);
    for (size_t i = 0; i < got.size(); i += unwritten.size())
      if (!std::memcmp(&got[i], unwritten.data(), unwritten.size())) fail(line, "element " + std::to_string(i / unwritten.size()) + " is unwritten");
    spare.emplace(array->bytes, array->data);
  }
  for (auto& array : call.in) spare.emplace(array->bytes, array->data);
}

}  // namespace

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) fail(argv[1], dlerror());
  std::ifstream calls(argv[2]);
  std::mt19937 random(1);
  int made = 0;
  for (std::string line; std::getline(calls, line); ++made) {
    Call call = parse(line);
    const auto handler = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, call.handler.c_str()));
    if (!handler) fail(line, dlerror());
    for (bool any_integer : {false, true}) make(line, call, handler, any_integer, random);
    if (made % 250 == 249) std::printf("%d calls made\n", made + 1), std::fflush(stdout);
  }
  std::printf("%d calls, each made twice\n", made);
}
