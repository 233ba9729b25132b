#include "adam.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cpu.h"
#include "half.h"
#include "workers.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OFFLOADD_INLINE inline __attribute__((always_inline))

namespace offloadd {
namespace {

// Elements between two thread boundaries; also a multiple of every vector width.
constexpr std::size_t kSplit = 16384;
// Elements converted and updated at a time: the two fp32 staging arrays (2 x 4 KiB) stay in the first-level cache.
constexpr std::size_t kTile = 1024;

// Each scalar is computed in double and rounded once, as the reference does.
struct Factors {
  float decay, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, correction2, eps, step, grad_scale;
  bool l2;
};

Factors make_factors(const AdamScalars& s) {
  Factors f{};
  const bool decays = s.weight_decay != 0.0;
  f.l2 = decays && !s.adamw;
  f.decay = decays && s.adamw ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0f;  // times one changes no bit
  f.weight_decay = static_cast<float>(s.weight_decay);
  f.beta1 = static_cast<float>(s.beta1);
  f.one_minus_beta1 = static_cast<float>(1.0 - s.beta1);
  f.beta2 = static_cast<float>(s.beta2);
  f.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
  f.correction2 = static_cast<float>(s.bias_correction2_sqrt);
  f.eps = static_cast<float>(s.eps);
  f.step = static_cast<float>(s.lr / s.bias_correction1);
  f.grad_scale = static_cast<float>(s.grad_scale);
  return f;
}

template <bool kL2>
OFFLOADD_INLINE void update(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict grad,
                            std::size_t count, const Factors& f) {
  const Factors c = f;  // a local copy, so that the compiler need not fear that a store changes a factor
  for (std::size_t i = 0; i < count; ++i) {
    float g = grad[i] * c.grad_scale;
    float weight = p[i];
    if constexpr (kL2) g = g + c.weight_decay * weight;
    weight = weight * c.decay;
    const float first = c.beta1 * m[i] + c.one_minus_beta1 * g;
    const float second = c.beta2 * v[i] + c.one_minus_beta2 * g * g;
    const float denominator = std::sqrt(second) / c.correction2 + c.eps;
    p[i] = weight - c.step * (first / denominator);
    m[i] = first;
    v[i] = second;
  }
}

OFFLOADD_INLINE void widen_bf16(const std::uint16_t* __restrict source, float* __restrict target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = from_bf16(source[i]);
}
OFFLOADD_INLINE void narrow_bf16(const float* __restrict source, std::uint16_t* __restrict target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = to_bf16(source[i]);
}
void widen_f16(const std::uint16_t* __restrict source, float* __restrict target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = from_f16(source[i]);
}
void narrow_f16(const float* __restrict source, std::uint16_t* __restrict target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = to_f16(source[i]);
}

#if defined(__x86_64__)
// The instruction and the portable code agree on every value; only the tail needs the latter.
__attribute__((target("avx,f16c"), noinline)) void widen_f16c(const std::uint16_t* source, float* target,
                                                              std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(half));
  }
  widen_f16(source + i, target + i, count - i);
}
__attribute__((target("avx,f16c"), noinline)) void narrow_f16c(const float* source, std::uint16_t* target,
                                                               std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
  }
  narrow_f16(source + i, target + i, count - i);
}
#else
void widen_f16c(const std::uint16_t* source, float* target, std::size_t count) { widen_f16(source, target, count); }
void narrow_f16c(const float* source, std::uint16_t* target, std::size_t count) { narrow_f16(source, target, count); }
#endif

// One thread's elements [first, last): tile by tile, every array read once from memory and written once. Inlined into
// each level's kernel below, whose attributes say for which instruction set the loops are vectorised.
template <bool kF16c>
OFFLOADD_INLINE void step_range(const AdamArrays& a, const Factors& f, std::size_t first, std::size_t last) {
  alignas(64) float staged[kTile];
  const auto* grad32 = static_cast<const float*>(a.grad);
  const auto* grad16 = static_cast<const std::uint16_t*>(a.grad);
  auto* out32 = static_cast<float*>(a.out);
  auto* out16 = static_cast<std::uint16_t*>(a.out);
  for (std::size_t at = first; at < last; at += kTile) {
    const std::size_t count = std::min(kTile, last - at);
    const float* grad = staged;
    switch (a.grad_dtype) {
      case Dtype::kF32:
        grad = grad32 + at;
        break;
      case Dtype::kBf16:
        widen_bf16(grad16 + at, staged, count);
        break;
      case Dtype::kF16:
        (kF16c ? widen_f16c : widen_f16)(grad16 + at, staged, count);
        break;
    }
    if (f.l2) {
      update<true>(a.master + at, a.exp_avg + at, a.exp_avg_sq + at, grad, count, f);
    } else {
      update<false>(a.master + at, a.exp_avg + at, a.exp_avg_sq + at, grad, count, f);
    }
    if (a.out == nullptr) continue;
    switch (a.out_dtype) {
      case Dtype::kF32:
        std::copy_n(a.master + at, count, out32 + at);
        break;
      case Dtype::kBf16:
        narrow_bf16(a.master + at, out16 + at, count);
        break;
      case Dtype::kF16:
        (kF16c ? narrow_f16c : narrow_f16)(a.master + at, out16 + at, count);
        break;
    }
  }
}

using Kernel = void (*)(const AdamArrays&, const Factors&, std::size_t, std::size_t);

void kernel_baseline(const AdamArrays& a, const Factors& f, std::size_t first, std::size_t last) {
  step_range<false>(a, f, first, last);
}
#if defined(__x86_64__)
__attribute__((target("sse4.2"))) void kernel_sse42(const AdamArrays& a, const Factors& f, std::size_t first,
                                                    std::size_t last) {
  step_range<false>(a, f, first, last);
}
__attribute__((target("avx2,f16c"))) void kernel_avx2(const AdamArrays& a, const Factors& f, std::size_t first,
                                                      std::size_t last) {
  step_range<true>(a, f, first, last);
}
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512"))) void kernel_avx512(
    const AdamArrays& a, const Factors& f, std::size_t first, std::size_t last) {
  step_range<true>(a, f, first, last);
}
#endif

Kernel pick_kernel() {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAvx512:
      return kernel_avx512;
    case CpuLevel::kAvx2:
      return kernel_avx2;
    case CpuLevel::kSse42:
      return kernel_sse42;
    case CpuLevel::kBaseline:
      break;
  }
#endif
  return kernel_baseline;
}

}  // namespace

void adam_step(const AdamArrays& arrays, const AdamScalars& scalars, std::size_t threads) {
  const Factors factors = make_factors(scalars);
  const Kernel kernel = pick_kernel();
  const std::size_t splits = (arrays.count + kSplit - 1) / kSplit;
  const std::size_t members = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(splits, 1));
  run_team(members, [&](std::size_t member) {
    const std::size_t first = splits * member / members * kSplit;
    const std::size_t last = std::min(splits * (member + 1) / members * kSplit, arrays.count);
    if (first < last) kernel(arrays, factors, first, last);
  });
}

}  // namespace offloadd
