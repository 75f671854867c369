#include "backends/cpu/kernel_table.h"

#include <initializer_list>

namespace sluice::cpu {
namespace {

bool Supports(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512cd");
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return isa == Isa::kPortable;
#endif
}

KernelTable Fill(Isa isa, bool act_bf16) {
  KernelTable t;
  constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  t.name = kNames[int(isa)];
  t.bf16_pairs = isa == Isa::kAvx512Bf16 && act_bf16;
  FillGemm(isa, &t);
  FillRowOps(isa, &t);
  FillAttention(isa, &t);
  if (t.bf16_pairs) {
    FillBf16Gemm(&t);
    FillBf16Attention(&t);
  }
  return t;
}

}  // namespace

const KernelTable* KernelsFor(Isa isa, bool act_bf16) {
  if (!Supports(isa)) return nullptr;
  static const KernelTable* tables[4][2] = {};
  static const bool filled = [] {
    for (Isa i : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
      if (!Supports(i)) continue;
      for (int act = 0; act < 2; ++act) tables[int(i)][act] = new KernelTable(Fill(i, act != 0));
    }
    return true;
  }();
  (void)filled;
  return tables[int(isa)][act_bf16 ? 1 : 0];
}

Isa BestIsa() {
  for (Isa i : {Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2}) {
    if (Supports(i)) return i;
  }
  return Isa::kPortable;
}

}  // namespace sluice::cpu
