// Which Highway targets the kernel files compile for: AVX-512, AVX2, and a portable form for everything else.
// Include before hwy/foreach_target.h.
#pragma once
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SSSE3 | HWY_AVX3_DL)
