// Pool rows of the reference backend: one function that writes a row in the pool's format and one that reads
// it back.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/device_pool.h"

namespace sluice::ops::reference {

// scale of e4m3 values: amax / 448, floored so that an all-zero tile has a finite one.
float E4M3Scale(const float* x, int64_t n);

// row: [kv_lora + rope], after norm and rope.
void StoreLatentRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset,
                    const float* row);
void LoadLatentRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset, float* row);
// row: [index_dim].
void StoreIndexRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset, const float* row);
void LoadIndexRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset, float* row);

}  // namespace sluice::ops::reference
