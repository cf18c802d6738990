// The arguments of one aclnn call, packed so that Python can read them, and the way to Python.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ascend_sim {

// Each argument begins with its kind. Layout of the words that follow:
//   kNull     -
//   kTensor   data pointer, dtype, storage offset, number of dimensions, sizes, strides
//   kInteger  value
//   kDouble   bits
//   kScalar   dtype, bits of the value in that dtype, zero-extended
//   kIntegers number, values          (aclIntArray, aclBoolArray)
//   kFloats   number, bits of doubles (aclFloatArray)
//   kTensors  number, tensors, each with its kind
//   kString   number of bytes, bytes padded to words
enum Kind : int64_t { kNull, kTensor, kInteger, kDouble, kScalar, kIntegers, kFloats, kTensors, kString };

using Words = std::vector<int64_t>;

struct Packed {  // what aclCreateTensor and its like give
    Words words;
};

struct Call {
    int op;
    Words words;

    explicit Call(int op) : op(op) {}
    Call& object(const void* packed);
    Call& integer(int64_t value);
    Call& real(double value);
    Call& text(const char* value);
};

// The first half of an aclnn call: log it, check its contract, give the executor. 0 or an error code.
int prepare(Call call, uint64_t* workspace_bytes, void** executor);
// The second half: put it on the stream.
int launch(void* executor, void* stream);
int not_simulated(const char* name);

}  // namespace ascend_sim
