#include "backends/cpu/linear.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/ids.h"

namespace sluice::cpu {
namespace {

// Rows of activations that stay in cache while panels stream over them (last-level share of one core).
constexpr int64_t kRowBlockBytes = 2 << 20;
// Under this much work a second thread costs more than it brings.
constexpr int64_t kForkBytes = 96 << 10;
constexpr int64_t kForkMacs = 1 << 20;

float F16ToF32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
  if (e == 31) return std::bit_cast<float>(sign | 0x7f800000u | m << 13);
  if (e == 0) {
    const float v = float(m) * 0x1p-24f;
    return sign ? -v : v;
  }
  return std::bit_cast<float>(sign | (e + 112) << 23 | m << 13);
}

// One row of a checkpoint matrix as f32.
void RowToF32(const KernelTable& t, const ops::WeightView& w, int64_t row, float* out) {
  const std::byte* p = static_cast<const std::byte*>(w.data) + row * w.in * SizeOf(w.dtype);
  switch (w.dtype) {
    case DType::kF32:
      std::memcpy(out, p, size_t(w.in) * 4);
      return;
    case DType::kBF16:
      t.bf16_to_f32(reinterpret_cast<const uint16_t*>(p), w.in, out);
      return;
    case DType::kF16:
      for (int64_t i = 0; i < w.in; ++i) out[i] = F16ToF32(reinterpret_cast<const uint16_t*>(p)[i]);
      return;
    case DType::kF8E4M3: {
      const int64_t bk = w.scale != nullptr ? w.scale_block_k : w.in;
      for (int64_t k = 0, b = 0; k < w.in; k += bk, ++b) {
        const float s = w.scale != nullptr ? w.scale[row / w.scale_block_n * CeilDiv(w.in, bk) + b] : 1.0f;
        t.dequant_e4m3(reinterpret_cast<const uint8_t*>(p) + k, std::min(bk, w.in - k), s, out + k);
      }
      return;
    }
    default:
      return;
  }
}

Status CheckView(const ops::WeightView& w) {
  if (w.dtype != DType::kF32 && w.dtype != DType::kBF16 && w.dtype != DType::kF16 &&
      w.dtype != DType::kF8E4M3) {
    return Unsupported("weight of type {} has no kernel; supported: float32, bf16, float16, fp8_e4m3",
                       Name(w.dtype));
  }
  if (w.out <= 0 || w.in <= 0 || w.data == nullptr)
    return Invalid("weight of shape [{}, {}] is empty", w.out, w.in);
  if (w.scale != nullptr && (w.scale_block_n <= 0 || w.scale_block_k <= 0)) {
    return Invalid("weight scale blocks of {} x {}; both must be positive", w.scale_block_n, w.scale_block_k);
  }
  return OkStatus();
}

// Can the group stay e4m3? One k block for all, finite scales that leave room for 2^120, no NaN code.
bool StaysFp8(std::span<const std::vector<ops::WeightView>> groups) {
  const int64_t block = groups[0][0].scale_block_k;
  for (const auto& views : groups) {
    for (const ops::WeightView& w : views) {
      if (w.dtype != DType::kF8E4M3 || w.scale == nullptr || w.scale_block_k != block || block % 2 != 0 ||
          w.in % 2 != 0) {
        return false;
      }
      for (int64_t i = 0; i < CeilDiv(w.out, w.scale_block_n) * CeilDiv(w.in, block); ++i) {
        if (!(std::fabs(w.scale[i]) < 128.0f)) return false;
      }
      const uint8_t* codes = static_cast<const uint8_t*>(w.data);
      for (int64_t i = 0; i < w.out * w.in; ++i) {
        if ((codes[i] & 0x7f) == 0x7f) return false;
      }
    }
  }
  return true;
}

GemmFn GemmFor(const KernelTable& t, PanelKind kind) {
  switch (kind) {
    case PanelKind::kF32:
      return t.gemm_f32;
    case PanelKind::kBF16:
      return t.gemm_f32_bf16;
    case PanelKind::kPairs:
      return t.gemm_pairs;
    case PanelKind::kPairsFp8:
      return t.gemm_pairs_fp8;
  }
  return nullptr;
}

// Of an activation as the kernel takes it.
int64_t ElementBytes(PanelKind kind) {
  return kind == PanelKind::kPairs || kind == PanelKind::kPairsFp8 ? 2 : 4;
}

Store StoreOf(ops::OutMode mode, DType act) {
  switch (mode) {
    case ops::OutMode::kF32:
      return Store::kF32;
    case ops::OutMode::kF32Add:
      return Store::kF32Add;
    case ops::OutMode::kAct:
      return act == DType::kBF16 ? Store::kBF16 : Store::kF32;
  }
  return Store::kF32;
}

int64_t StoreBytes(Store s) { return s == Store::kBF16 ? 2 : 4; }

// Twelve rows whose stride is a multiple of this share one or two sets of an 8-way, 32 KB L1 and evict each
// other.
constexpr int64_t kSetStride = 2048;
bool Conflicts(int64_t row_bytes, int64_t rows) { return rows > 8 && row_bytes % kSetStride == 0; }
// Elements from row to row that avoid it, for a copy of rows of `cols` elements.
int64_t SpreadStride(int64_t cols, int64_t element, int64_t rows) {
  return Conflicts(cols * element, rows) ? cols + 64 / element : cols;
}

// Rows [0, rows) of x in the kernel's type at stride `to_ld`.
void CopyRows(const KernelTable& t, bool widen, const std::byte* x, int64_t from_ld, int64_t rows,
              int64_t cols, int64_t element, std::byte* to, int64_t to_ld) {
  for (int64_t r = 0; r < rows; ++r) {
    if (widen) {
      t.bf16_to_f32(reinterpret_cast<const uint16_t*>(x) + r * from_ld, cols,
                    reinterpret_cast<float*>(to) + r * to_ld);
    } else {
      std::memcpy(to + r * to_ld * element, x + r * from_ld * element, size_t(cols * element));
    }
  }
}

// x as the kernels want it: f32 where there is no bf16 dot product, rows spread over cache sets. x itself
// when it is so.
const void* Input(CpuQueue& q, const KernelTable& t, DType act, const void* x, int64_t rows, int64_t cols,
                  int64_t* ld) {
  const bool widen = act == DType::kBF16 && !t.bf16_pairs;
  const int64_t element = t.bf16_pairs ? 2 : 4;
  if (!widen && !Conflicts(*ld * element, rows)) return x;
  const int64_t from_ld = *ld, to_ld = SpreadStride(cols, element, rows);
  std::byte* copy = q.input().Get(rows * to_ld * element);
  const int64_t step = std::max<int64_t>(1, (64 << 10) / cols);
  q.group().ParallelFor(CeilDiv(rows, step), [&](int, int64_t i) {
    CopyRows(t, widen, static_cast<const std::byte*>(x) + i * step * from_ld * SizeOf(act), from_ld,
             std::min(step, rows - i * step), cols, element, copy + i * step * to_ld * element, to_ld);
  });
  *ld = to_ld;
  return copy;
}

// A product of one packed matrix; a and c are typed by the kernel and the store.
struct Product {
  const PackedLinear* w;
  int64_t group;
  int64_t rows;
  const std::byte* a;
  int64_t lda;
  std::byte* c;
  int64_t ldc;
  Store store;
};

void RunBlock(CpuQueue& q, int thread, const KernelTable& t, const Product& p, int64_t row0, int64_t rows,
              int64_t panel0, int64_t panels) {
  const PackedLinear& w = *p.w;
  GemmArgs g;
  g.a = p.a + row0 * p.lda * ElementBytes(w.kind());
  g.lda = p.lda;
  g.rows = rows;
  g.k = w.in;
  g.b = w.group(p.group) + panel0 * w.panel_bytes();
  g.panel_bytes = w.panel_bytes();
  g.cols = std::min(w.out - panel0 * t.nr, panels * t.nr);
  g.c = p.c + (row0 * p.ldc + panel0 * t.nr) * StoreBytes(p.store);
  g.ldc = p.ldc;
  g.store = p.store;
  g.scale_block = w.scale_block();
  if (w.kind() != PanelKind::kPairsFp8 || rows <= KernelTable::kFp8Rows) return GemmFor(t, w.kind())(g);
  auto* decoded = reinterpret_cast<uint16_t*>(q.panel(thread).Get(w.in * t.nr * 2));
  const std::byte* panel = static_cast<const std::byte*>(g.b);
  for (int64_t cols = g.cols; cols > 0; cols -= t.nr, panel += w.panel_bytes()) {
    t.decode_panel_fp8(panel, w.in, w.scale_block(), decoded);
    g.b = decoded;
    g.cols = std::min(cols, t.nr);
    t.gemm_pairs(g);
    g.c = static_cast<std::byte*>(g.c) + t.nr * StoreBytes(p.store);
  }
}

void RunProduct(CpuQueue& q, const KernelTable& t, const Product& p) {
  if (p.rows <= 0) return;
  const int64_t panels = CeilDiv(p.w->out, t.nr), threads = q.threads();
  if (threads == 1 || (panels * p.w->panel_bytes() < kForkBytes && p.rows * p.w->out * p.w->in < kForkMacs)) {
    for (int64_t row = 0, block = std::max<int64_t>(
                              96, kRowBlockBytes / (p.w->in * ElementBytes(p.w->kind())) / 12 * 12);
         row < p.rows; row += block) {
      RunBlock(q, 0, t, p, row, std::min(block, p.rows - row), 0, panels);
    }
    return;
  }
  int64_t block = std::max<int64_t>(96, kRowBlockBytes / (p.w->in * ElementBytes(p.w->kind())) / 12 * 12);
  block = std::min(block, p.rows);
  const int64_t row_blocks = CeilDiv(p.rows, block);
  // Enough tasks to balance, each long enough to stream: at least 64 KB of weights when few rows share them.
  int64_t chunk = std::max<int64_t>(1, panels * row_blocks / (threads * 8));
  if (p.rows <= 12)
    chunk = std::max(chunk, std::min(CeilDiv(panels, threads), CeilDiv(64 << 10, p.w->panel_bytes())));
  const int64_t chunks = CeilDiv(panels, chunk);
  q.group().ParallelFor(chunks * row_blocks, [&](int thread, int64_t i) {
    const int64_t rb = i / chunks, panel0 = i % chunks * chunk;
    RunBlock(q, thread, t, p, rb * block, std::min(block, p.rows - rb * block), panel0,
             std::min(chunk, panels - panel0));
  });
}

}  // namespace

StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const KernelTable& t, DType act,
                                                   std::span<const std::vector<ops::WeightView>> groups,
                                                   WeightMemory& memory) {
  if (groups.empty() || groups[0].empty()) return Invalid("no weight to pack");
  auto p = std::make_unique<PackedLinear>();
  p->groups = int64_t(groups.size());
  p->in = groups[0][0].in;
  for (const ops::WeightView& w : groups[0]) p->out += w.out;
  bool all_bf16 = true;
  for (const auto& views : groups) {
    int64_t out = 0;
    for (const ops::WeightView& w : views) {
      RETURN_IF_ERROR(CheckView(w));
      if (w.in != p->in)
        return Invalid("weights of one group have {} and {} inputs; they must be equal", p->in, w.in);
      out += w.out;
      all_bf16 = all_bf16 && w.dtype == DType::kBF16;
    }
    if (out != p->out) return Invalid("groups have {} and {} outputs; they must be equal", p->out, out);
  }
  p->kind_ = t.bf16_pairs ? (StaysFp8(groups) ? PanelKind::kPairsFp8 : PanelKind::kPairs)
                          : (act == DType::kBF16 || all_bf16 ? PanelKind::kBF16 : PanelKind::kF32);
  p->kernel =
      fmt::format("{} {}", t.name,
                  p->kind_ == PanelKind::kPairsFp8 ? "e4m3 rounded to bf16 pairs in registers, k in order"
                  : p->kind_ == PanelKind::kPairs  ? "bf16 pairs, k in order"
                  : p->kind_ == PanelKind::kBF16   ? "bf16 widened, k in order"
                                                   : "f32, k in order");
  const int64_t nr = t.nr, panels = CeilDiv(p->out, nr);
  p->scale_block_ = p->kind_ == PanelKind::kPairsFp8 ? groups[0][0].scale_block_k : 0;
  const int64_t scale_blocks = p->scale_block_ > 0 ? CeilDiv(p->in, p->scale_block_) : 0;
  switch (p->kind_) {
    case PanelKind::kF32:
      p->panel_bytes_ = p->in * nr * 4;
      break;
    case PanelKind::kBF16:
      p->panel_bytes_ = p->in * nr * 2;
      break;
    case PanelKind::kPairs:
      p->panel_bytes_ = AlignUp(p->in, 2) * nr * 2;
      break;
    case PanelKind::kPairsFp8:
      p->panel_bytes_ = (scale_blocks * 4 + p->in) * nr;
      break;
  }
  p->group_bytes_ = AlignUp(panels * p->panel_bytes_, 64);
  p->packed_bytes = AlignUp(p->group_bytes_ * p->groups, WeightMemory::kAlign);
  ASSIGN_OR_RETURN(p->data_, memory.Take(p->packed_bytes));

  std::vector<float> row(size_t(p->in) + 1);
  std::vector<uint16_t> half(size_t(p->in) + 1);
  for (int64_t g = 0; g < p->groups; ++g) {
    int64_t n = 0;
    for (const ops::WeightView& w : groups[size_t(g)]) {
      for (int64_t r = 0; r < w.out; ++r, ++n) {
        std::byte* panel = p->data_.get() + g * p->group_bytes_ + n / nr * p->panel_bytes_;
        const int64_t j = n % nr;
        if (p->kind_ == PanelKind::kPairsFp8) {
          float* scale = reinterpret_cast<float*>(panel);
          for (int64_t b = 0; b < scale_blocks; ++b)
            scale[b * nr + j] = w.scale[r / w.scale_block_n * scale_blocks + b];
          const uint8_t* src = static_cast<const uint8_t*>(w.data) + r * w.in;
          uint8_t* dst = reinterpret_cast<uint8_t*>(panel) + scale_blocks * nr * 4;
          for (int64_t k = 0; k < p->in; k += 2) std::memcpy(dst + (k / 2 * nr + j) * 2, src + k, 2);
          continue;
        }
        RowToF32(t, w, r, row.data());
        if (p->kind_ == PanelKind::kF32) {
          float* dst = reinterpret_cast<float*>(panel);
          for (int64_t k = 0; k < p->in; ++k) dst[k * nr + j] = row[size_t(k)];
          continue;
        }
        t.f32_to_bf16(row.data(), p->in, half.data());
        uint16_t* dst = reinterpret_cast<uint16_t*>(panel);
        if (p->kind_ == PanelKind::kBF16) {
          for (int64_t k = 0; k < p->in; ++k) dst[k * nr + j] = half[size_t(k)];
          continue;
        }
        half[size_t(p->in)] = 0;
        for (int64_t k = 0; k < p->in; k += 2) std::memcpy(dst + (k / 2 * nr + j) * 2, &half[size_t(k)], 4);
      }
    }
  }
  return p;
}

void RunLinear(CpuQueue& q, const KernelTable& t, DType act, const ops::LinearArgs& a) {
  const auto& w = static_cast<const PackedLinear&>(*a.weight);
  int64_t lda = a.x_ld != 0 ? a.x_ld : w.in;
  const void* x = Input(q, t, act, a.x, a.rows, w.in, &lda);
  RunProduct(q, t,
             {.w = &w,
              .group = 0,
              .rows = a.rows,
              .a = static_cast<const std::byte*>(x),
              .lda = lda,
              .c = static_cast<std::byte*>(a.y),
              .ldc = a.y_ld != 0 ? a.y_ld : w.out,
              .store = StoreOf(a.mode, act)});
}

void RunHeads(CpuQueue& q, const KernelTable& t, DType act, const ops::HeadLinearArgs& a) {
  if (a.rows <= 0) return;
  const auto& w = static_cast<const PackedLinear&>(*a.weight);
  const Store store = act == DType::kBF16 ? Store::kBF16 : Store::kF32;
  const int64_t element = SizeOf(act), panels = CeilDiv(w.out, t.nr);
  const bool widen = act == DType::kBF16 && !t.bf16_pairs;
  const int64_t kernel_element = t.bf16_pairs ? 2 : 4;
  // A task is some heads of one row block, or one head's row block when rows are many.
  const int64_t block = std::min<int64_t>(a.rows, 192), row_blocks = CeilDiv(a.rows, block);
  const int64_t macs = a.rows * w.out * w.in;
  int64_t heads = std::max<int64_t>(1, w.groups / (q.threads() * 4));
  if (macs * w.groups < kForkMacs && w.groups * panels * w.panel_bytes() < kForkBytes) heads = w.groups;
  const int64_t chunks = CeilDiv(w.groups, heads);
  q.group().ParallelFor(chunks * row_blocks, [&](int thread, int64_t i) {
    const int64_t row0 = i / chunks * block, rows = std::min(block, a.rows - row0);
    for (int64_t h = i % chunks * heads; h < std::min(w.groups, (i % chunks + 1) * heads); ++h) {
      const std::byte* x = static_cast<const std::byte*>(a.x) + (row0 * a.x_row + h * a.x_head) * element;
      int64_t lda = a.x_row;
      if (widen || Conflicts(a.x_row * kernel_element, rows)) {
        lda = SpreadStride(w.in, kernel_element, rows);
        std::byte* copy = q.group().scratch(thread).Get(rows * lda * kernel_element);
        CopyRows(t, widen, x, a.x_row, rows, w.in, kernel_element, copy, lda);
        x = copy;
      }
      std::byte* y = static_cast<std::byte*>(a.y) + (row0 * a.y_row + h * a.y_head) * element;
      RunBlock(
          q, thread, t,
          {.w = &w, .group = h, .rows = rows, .a = x, .lda = lda, .c = y, .ldc = a.y_row, .store = store}, 0,
          rows, 0, panels);
    }
  });
}

// Rows move to their experts and back: [token, slot] pairs sorted by expert (stable), two products, then each
// token adds its slots in order. Scratch is bounded by cutting the batch into row chunks.
void RunMoe(CpuQueue& q, const KernelTable& t, DType act, const ops::MoeArgs& a) {
  if (a.rows <= 0 || a.topk <= 0) return;
  const auto& up = static_cast<const PackedLinear&>(*a.gate_up);
  const auto& down = static_cast<const PackedLinear&>(*a.down);
  const int64_t experts = up.groups, hidden = up.in, inner = down.in, out = down.out;
  const bool pairs = t.bf16_pairs;
  const int64_t in_bytes = pairs ? 2 : 4;
  const int64_t x_ld = SpreadStride(hidden, in_bytes, 9), mid_ld = SpreadStride(inner, in_bytes, 9);
  const int64_t per_pair = x_ld * in_bytes + 2 * inner * 4 + mid_ld * in_bytes + out * 4;
  const int64_t chunk_rows =
      std::max<int64_t>(1, std::min(a.rows, (int64_t(256) << 20) / (per_pair * a.topk)));
  for (int64_t first = 0; first < a.rows; first += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, a.rows - first), n = rows * a.topk;
    const int32_t* expert = a.expert + first * a.topk;
    const float* weight = a.expert_weight + first * a.topk;
    auto carve = [&](Carver c, auto use) {
      auto* x = c.Take<std::byte>(n * x_ld * in_bytes);
      auto* gate_up = c.Take<float>(n * 2 * inner);
      auto* mid = c.Take<std::byte>(n * mid_ld * in_bytes);
      auto* y = c.Take<float>(n * out);
      auto* begin = c.Take<int32_t>(experts + 1);
      auto* fill = c.Take<int32_t>(experts + 1);
      auto* place = c.Take<int32_t>(n);   // pair -> compact row
      auto* source = c.Take<int32_t>(n);  // compact row -> token
      use(x, gate_up, mid, y, begin, fill, place, source);
      return c.used();
    };
    std::byte* base = q.shared().Get(carve(Carver(nullptr), [](auto...) {}));
    carve(Carver(base), [&](std::byte* x, float* gate_up, std::byte* mid, float* y, int32_t* begin,
                            int32_t* fill, int32_t* place, int32_t* source) {
      std::fill(begin, begin + experts + 1, 0);
      for (int64_t i = 0; i < n; ++i) {
        SLUICE_DCHECK(expert[i] < experts, "expert {}", expert[i]);
        if (expert[i] >= 0) ++begin[expert[i] + 1];  // a negative id: no expert in this slot
      }
      for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
      std::copy(begin, begin + experts, fill);
      for (int64_t i = 0; i < n; ++i) {
        place[i] = expert[i] >= 0 ? fill[expert[i]]++ : -1;
        if (place[i] >= 0) source[place[i]] = int32_t(first + i / a.topk);
      }
      const int64_t used = begin[experts];
      const int64_t element = SizeOf(act), gather = std::max<int64_t>(1, (32 << 10) / (hidden * in_bytes));
      q.group().ParallelFor(CeilDiv(used, gather), [&](int, int64_t task) {
        for (int64_t i = task * gather; i < std::min(used, (task + 1) * gather); ++i) {
          const std::byte* from = static_cast<const std::byte*>(a.x) + source[i] * hidden * element;
          std::byte* to = x + i * x_ld * in_bytes;
          if (in_bytes == element) {
            std::memcpy(to, from, size_t(hidden * element));
          } else {
            t.bf16_to_f32(reinterpret_cast<const uint16_t*>(from), hidden, reinterpret_cast<float*>(to));
          }
        }
      });
      // Tasks are (expert, panel range); experts without rows have none.
      auto grouped = [&](const PackedLinear& w, const std::byte* in, int64_t ld, float* c) {
        std::vector<int32_t>& tasks = q.ints();
        tasks.clear();
        const int64_t panels = CeilDiv(w.out, t.nr);
        const int64_t step =
            std::max<int64_t>(1, std::min(CeilDiv(panels, 2), CeilDiv(256 << 10, w.panel_bytes())));
        for (int64_t e = 0; e < experts; ++e) {
          if (begin[e + 1] == begin[e]) continue;
          for (int64_t p = 0; p < panels; p += step) {
            tasks.push_back(int32_t(e));
            tasks.push_back(int32_t(p));
          }
        }
        q.group().ParallelFor(int64_t(tasks.size() / 2), [&](int thread, int64_t i) {
          const int64_t e = tasks[size_t(2 * i)], p = tasks[size_t(2 * i + 1)], row = begin[e];
          RunBlock(q, thread, t,
                   {.w = &w,
                    .group = e,
                    .rows = begin[e + 1] - row,
                    .a = in + row * ld * in_bytes,
                    .lda = ld,
                    .c = reinterpret_cast<std::byte*>(c + row * w.out),
                    .ldc = w.out,
                    .store = Store::kF32},
                   0, begin[e + 1] - row, p, std::min(step, panels - p));
        });
      };
      grouped(up, x, x_ld, gate_up);
      const int64_t rows_a_task = std::max<int64_t>(1, (16 << 10) / inner);
      q.group().ParallelFor(CeilDiv(used, rows_a_task), [&](int thread, int64_t task) {
        float* f = reinterpret_cast<float*>(q.group().scratch(thread).Get(inner * 4));
        for (int64_t i = task * rows_a_task; i < std::min(used, (task + 1) * rows_a_task); ++i) {
          const float* g = gate_up + i * 2 * inner;
          if (pairs) {
            t.silu_mul(g, g + inner, inner, f);
            t.f32_to_bf16(f, inner, reinterpret_cast<uint16_t*>(mid) + i * mid_ld);
            continue;
          }
          float* m = reinterpret_cast<float*>(mid) + i * mid_ld;
          t.silu_mul(g, g + inner, inner, m);
          if (act == DType::kBF16) {  // the activation type's rounding is part of the numbers
            uint16_t* h = reinterpret_cast<uint16_t*>(f);
            t.f32_to_bf16(m, inner, h);
            t.bf16_to_f32(h, inner, m);
          }
        }
      });
      grouped(down, mid, mid_ld, y);
      const int64_t combine = std::max<int64_t>(1, (16 << 10) / (out * a.topk));
      q.group().ParallelFor(CeilDiv(rows, combine), [&](int thread, int64_t task) {
        const float** d = reinterpret_cast<const float**>(q.group().scratch(thread).Get(a.topk * 12));
        float* w = reinterpret_cast<float*>(d + a.topk);
        for (int64_t r = task * combine; r < std::min(rows, (task + 1) * combine); ++r) {
          int64_t count = 0;
          for (int64_t s = 0; s < a.topk; ++s) {
            if (place[r * a.topk + s] < 0) continue;
            w[count] = weight[r * a.topk + s];
            d[count++] = y + int64_t(place[r * a.topk + s]) * out;
          }
          t.combine(a.y + (first + r) * out, d, w, count, out);
        }
      });
    });
  }
}

void RunSumSlots(CpuQueue& q, const KernelTable& t, const ops::SumSlotsArgs& a) {
  const int64_t step = std::max<int64_t>(1, (16 << 10) / (a.hidden * a.topk));
  q.group().ParallelFor(CeilDiv(a.rows, step), [&](int thread, int64_t task) {
    const float** d = reinterpret_cast<const float**>(q.group().scratch(thread).Get(a.topk * 12));
    float* w = reinterpret_cast<float*>(d + a.topk);
    for (int64_t r = task * step; r < std::min(a.rows, (task + 1) * step); ++r) {
      int64_t count = 0;
      for (int64_t s = 0; s < a.topk; ++s) {
        if (a.row[r * a.topk + s] == nullptr) continue;
        w[count] = a.weight[r * a.topk + s];
        d[count++] = a.row[r * a.topk + s];
      }
      t.combine(a.y + r * a.hidden, d, w, count, a.hidden);
    }
  });
}

}  // namespace sluice::cpu
