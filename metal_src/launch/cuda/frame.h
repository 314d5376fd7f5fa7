// A call of a handler from one line of text, as XLA would make it: the handler, then in:DTYPE:SHAPE: and out:DTYPE:SHAPE:[the operand whose
// memory it is], and attr:NAME:TYPE:VALUE by name. SHAPE is 4x8; the types are those of XLA's own programs.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace frame {

struct Dtype {
  const char* name;
  XLA_FFI_DataType code;
  size_t bytes;
};
constexpr Dtype dtypes[] = {{"f32", XLA_FFI_DataType_F32, 4}, {"bf16", XLA_FFI_DataType_BF16, 2}, {"f16", XLA_FFI_DataType_F16, 2},
                            {"i32", XLA_FFI_DataType_S32, 4}, {"ui32", XLA_FFI_DataType_U32, 4}, {"i64", XLA_FFI_DataType_S64, 8},
                            {"i1", XLA_FFI_DataType_PRED, 1}};

inline const Dtype& dtype_of(const std::string& name) {
  for (const Dtype& dtype : dtypes)
    if (name == dtype.name) return dtype;
  throw std::invalid_argument(name + " is no dtype of a call");
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

inline XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
inline XLA_FFI_Error* null_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

struct Call {
  std::string handler;
  std::vector<std::unique_ptr<Array>> in, out;
  std::vector<std::unique_ptr<Attribute>> attributes;

  // On the null stream. What the handler says went wrong; empty if nothing did.
  std::string make(XLA_FFI_Handler* function) {
    std::vector<XLA_FFI_ArgType> arg_types(in.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(out.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attribute_types(attributes.size(), XLA_FFI_AttrType_SCALAR);
    std::vector<void*> args, rets, scalars;
    std::vector<XLA_FFI_ByteSpan*> names;
    for (auto& array : in) args.push_back(array->described());
    for (auto& array : out) rets.push_back(array->described());
    for (auto& a : attributes) names.push_back(&a->span), scalars.push_back(&a->scalar);
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = create;
    api.XLA_FFI_Stream_Get = null_stream;
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(args.size()), arg_types.data(), args.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(rets.size()), ret_types.data(), rets.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(names.size()), attribute_types.data(), names.data(), scalars.data()};
    const std::unique_ptr<XLA_FFI_Error> error(function(&frame));
    return error ? error->message : "";
  }
};

inline Call parse(const std::string& line) {
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
    for (std::istringstream shape(part[2]); std::getline(shape, dim, 'x');) {
      array->dims.push_back(std::stoll(dim));
      array->bytes *= array->dims.back();
    }
    if (!part[3].empty()) array->alias = std::stoi(part[3]);
    (part[0] == "in" ? call.in : call.out).push_back(std::move(array));
  }
  return call;
}

}  // namespace frame
