// The experts of one rank as the backend runs them, with noise for weights and rows.
#pragma once

#include "tools/cuda/check.h"

namespace sluice::cuda {

// Sorted rows, quantised, both products and the weighted sum.
struct ExpertRun {
  int experts, hidden, inter, topk, rows, pairs, tile;
  int64_t cap;
  Dev<int32_t> e, begins, sorted, tiles;
  Dev<float> ew, gate_up, y, xs, as, su, sd;
  Dev<__nv_bfloat16> x, out;
  Dev<uint8_t> x8, act, wu, wd;

  ExpertRun(int experts_, int hidden_, int inter_, int topk_, const std::vector<int32_t>& expert,
            const std::vector<float>& weight, int tile_, float scales = 2e-4f)
      : experts(experts_),
        hidden(hidden_),
        inter(inter_),
        topk(topk_),
        rows(int(expert.size()) / topk_),
        pairs(int(expert.size())),
        tile(tile_),
        cap(MaxSortedRows(pairs, experts_, tile_)),
        e(expert),
        begins(size_t(experts_)),
        sorted(size_t(cap)),
        tiles(size_t(cap / tile_ + 1)),
        ew(weight),
        gate_up(tile_ == 128 ? 1 : size_t(cap) * 2 * inter_),
        y(size_t(rows) * hidden_),
        xs(size_t(RowScales(cap, hidden_))),
        as(size_t(RowScales(cap, inter_))),
        su(size_t(experts_) * WeightScales(2 * inter_, hidden_)),
        sd(size_t(experts_) * WeightScales(hidden_, inter_)),
        x(size_t(rows) * hidden_),
        out(size_t(pairs) * hidden_),
        x8(size_t(cap) * hidden_),
        act(size_t(cap) * inter_),
        wu(size_t(experts_) * 2 * inter_ * hidden_),
        wd(size_t(experts_) * inter_ * hidden_) {
    Fill(x.p, x.n, 51);
    Fill(wu.p, wu.n, 52);
    Fill(wd.p, wd.n, 53);
    Fill(su.p, su.n, 54, scales);
    Fill(sd.p, sd.n, 55, scales);
    Fill(y.p, y.n, 56);
  }
  SortedRows Rows() const { return {sorted.p, tiles.p + cap / tile, tile, cap}; }
  void Sort() {
    LaunchSortPairs(stream, e.p, pairs, experts, tile, nullptr, begins.p, sorted.p, tiles.p, int(cap));
  }
  void Gather() { LaunchQuantiseSorted(stream, x.p, hidden, hidden, Rows(), topk, x8.p, xs.p); }
  Gemm Common() {
    Gemm g;
    g.rows = int(cap);
    g.groups = experts;
    g.tile_rows = tile;
    g.tile_group = tiles.p;
    g.tiles_used = tiles.p + cap / tile;
    g.sorted = sorted.p;
    g.x_fp8 = g.w_fp8 = true;
    return g;
  }
  void Up() {
    Gemm g = Common();
    g.n = tile == 128 ? inter : 2 * inter;
    g.k = hidden;
    g.x = x8.p;
    g.x_ld = hidden;
    g.x_scale = xs.p;
    g.w = wu.p;
    g.scale64 = su.p;
    if (tile == 128) {
      g.y = act.p;
      g.y_ld = inter;
      g.y_scale = as.p;
      CUDA_OK(LaunchGemm(stream, g));
      return;
    }
    g.y = gate_up.p;
    g.y_ld = 2 * inter;
    CUDA_OK(LaunchGemm(stream, g));
    const SortedRows r = Rows();
    LaunchSiluQuantise(stream, gate_up.p, cap, inter, &r, act.p, as.p);
  }
  void Down() {
    Gemm g = Common();
    g.n = hidden;
    g.k = inter;
    g.x = act.p;
    g.x_ld = inter;
    g.x_scale = as.p;
    g.w = wd.p;
    g.scale64 = sd.p;
    g.y = out.p;
    g.y_ld = hidden;
    g.out = Out::kAct;
    g.scatter = true;
    CUDA_OK(LaunchGemm(stream, g));
  }
  void All() {
    Sort();
    Gather();
    Up();
    Down();
    LaunchCombine(stream, out.p, true, e.p, ew.p, rows, topk, hidden, y.p);
  }
};

}  // namespace sluice::cuda
