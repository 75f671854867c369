// How a matrix product over packed panels is cut into register tiles: one walk for every kernel family, so
// that each of them visits the same tiles in the same order. The order changes no bit: an element belongs to
// one tile.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "backends/cpu/kernel_table.h"

namespace sluice::cpu {

// Panels that a tile of `rows` rows can hold beside each other in the registers of a kernel with `max_rows`.
constexpr int PanelsBeside(int rows, int max_rows) {
  return rows <= max_rows / 4 ? 4 : (rows <= max_rows / 2 ? 2 : 1);
}

// Calls tile(panels beside each other, first row, rows, first panel). `tile` is a kernel of at most kMaxRows
// rows.
template <int kMaxRows, typename TileFn>
void WalkTiles(const GemmArgs& g, int64_t panel_width, TileFn tile) {
  if (g.rows <= 0) return;
  const int64_t panels = (g.cols + panel_width - 1) / panel_width;
  const int64_t tiles = (g.rows + kMaxRows - 1) / kMaxRows;
  const auto rows_of = [&](int64_t t, int64_t row) {
    return int((g.rows - row + tiles - t - 1) / (tiles - t));
  };
  // A small B stays in L2 whichever way it is walked: then go row by row, so that sums are stored along rows
  // and not down columns whose lines share a cache set.
  if (tiles > 1 && panels * g.panel_bytes <= (256 << 10)) {
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = rows_of(t, row);
      for (int64_t p = 0; p < panels; ++p) {
        tile(1, row, rows, p);
        if (g.prefetch != nullptr) g.prefetch->Step();
      }
      row += rows;
    }
    return;
  }
  const int wide = PanelsBeside(int(std::min<int64_t>(g.rows, kMaxRows)), kMaxRows);
  for (int64_t p = 0; p < panels;) {
    const int beside = p + wide <= panels ? wide : (p + 2 <= panels && wide > 1 ? 2 : 1);
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = rows_of(t, row);
      tile(beside, row, rows, p);
      row += rows;
      if (g.prefetch != nullptr) g.prefetch->Step();
    }
    p += beside;
  }
}

}  // namespace sluice::cpu
