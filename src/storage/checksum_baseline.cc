#define SLUICE_XXH_NAMESPACE xxh_baseline
#include "storage/checksum_impl.inc"
