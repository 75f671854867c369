// Compiled with -mavx512f (CMakeLists.txt); called only where the processor has it.
#define SLUICE_XXH_NAMESPACE xxh_avx512
#include "storage/checksum_impl.inc"
