// The fused optimizer step and the yardstick it is measured against. Pointers and scalars in, memory changed in place.
//
// Bits depend on the inputs only: not on the instruction set, the number of threads, alignment or position. Hence no
// contraction to fused multiply-add, no approximate reciprocal or square root, and vector tails that are ordinary IEEE
// operations. The order of operations is that of trainer/optim/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offloadd {

enum class Dtype { kF32 = 0, kBf16 = 1, kF16 = 2 };

struct AdamArrays {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  Dtype grad_dtype;
  void* out;  // null: no copy
  Dtype out_dtype;
  std::size_t count;
};

struct AdamScalars {
  double lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, grad_scale;
  bool adamw;
};

void adam_step(const AdamArrays& arrays, const AdamScalars& scalars, std::size_t threads);

// Bytes per second of an in-place kernel with four read streams and `writes` (3 or 4) write streams over `bytes`.
double stream_copy_bytes(std::size_t threads, std::size_t bytes, int writes);

}  // namespace offloadd
