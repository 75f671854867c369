#include "backends/cuda/cublaslt_linear.h"

#include <algorithm>

#include "backends/cuda/gemm_choice.h"
#include "base/log.h"

namespace sluice::cuda {

StatusOr<std::unique_ptr<CublasLtLinear>> CublasLtLinear::Make(const std::string& fp8_gemm,
                                                               int multiprocessors, CudaMemory& memory) {
  if (fp8_gemm != "auto" && fp8_gemm != "cublaslt") return std::unique_ptr<CublasLtLinear>();
  std::string why;
  std::unique_ptr<CublasLtGemm> gemm = CublasLtGemm::Open(&why);
  if (gemm == nullptr) {
    if (fp8_gemm == "cublaslt")
      return Unavailable("--fp8-gemm-backend cublaslt: {}; or leave the flag out", why);
    spdlog::info("fp8 products: the own kernel alone ({})", why);
    return std::unique_ptr<CublasLtLinear>();
  }
  spdlog::info("fp8 products: the own kernel, and cuBLASLt {} at {}", gemm->version(), gemm->path());
  return std::unique_ptr<CublasLtLinear>(
      new CublasLtLinear(std::move(gemm), fp8_gemm == "cublaslt", multiprocessors, memory));
}

std::string CublasLtLinear::Name() const {
  return fmt::format("cuBLASLt {} where it {}", gemm_->version(), always_ ? "can" : "is faster");
}

StatusOr<std::shared_ptr<std::byte>> CublasLtLinear::Pack(const std::vector<ops::WeightView>& parts,
                                                          int64_t out, int64_t in,
                                                          const std::shared_ptr<std::byte>& w) {
  if (out % 16 != 0 || in % 128 != 0) return std::shared_ptr<std::byte>();
  const int64_t ld = BlockScaleLd(in), blocks_k = in / 128;
  std::vector<float> scales(static_cast<size_t>(BlockScales(out, in)));
  int64_t row0 = 0;
  for (const ops::WeightView& v : parts) {
    if (v.scale_block_n != 128 || row0 % 128 != 0) return std::shared_ptr<std::byte>();
    for (int64_t b = 0; b < CeilDiv(v.out, int64_t(128)); ++b)
      std::copy_n(v.scale + b * blocks_k, blocks_k, scales.begin() + (row0 / 128 + b) * ld);
    row0 += v.out;
  }
  const int64_t bytes = int64_t(scales.size()) * 4;
  ASSIGN_OR_RETURN(std::shared_ptr<std::byte> packed, memory_.Allocate(bytes, "weight scales"));
  memory_.Copy(packed.get(), scales.data(), bytes);
  packed_[{out, in}] = {w, packed};
  return packed;
}

Status CublasLtLinear::Prepare(int64_t max_rows) {
  constexpr int kRows = 16;
  for (const auto& [shape, weight] : packed_) {
    const auto& [out, in] = shape;
    gemm_->Prepare(int(out), int(in), int(max_rows));
    const std::shared_ptr<std::byte> w = weight.first.lock(), w_scale = weight.second.lock();
    if (w == nullptr || w_scale == nullptr) continue;
    ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> x, memory_.Allocate(kRows * in, "first product"));
    ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> x_scale,
                     memory_.Allocate(kRows * in / 128 * 4, "first product"));
    ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> y, memory_.Allocate(kRows * out * 4, "first product"));
    gemm_->Load(nullptr, {.rows = kRows,
                          .n = int(out),
                          .k = int(in),
                          .x = x.get(),
                          .x_scale = reinterpret_cast<const float*>(x_scale.get()),
                          .w = w.get(),
                          .w_scale = reinterpret_cast<const float*>(w_scale.get()),
                          .y = y.get(),
                          .y_ld = out});
    const cudaError_t error = cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) return FromCuda(error, "first products of cuBLASLt");
  }
  return OkStatus();
}

bool CublasLtLinear::Launch(CudaQueue& q, const Gemm& g, const std::byte* scales) const {
  if (!always_ && !CublasLtIsFaster(g.rows, g.n, multiprocessors_)) return false;
  auto* x = q.Scratch<uint8_t>(CudaQueue::kInput8, int64_t(g.rows) * g.k);
  auto* x_scale = q.Scratch<float>(CudaQueue::kInputScale, RowScales(g.rows, g.k));
  const BlockScaledProduct p{.rows = g.rows,
                             .n = g.n,
                             .k = g.k,
                             .x = x,
                             .x_scale = x_scale,
                             .w = g.w,
                             .w_scale = reinterpret_cast<const float*>(scales),
                             .y = g.y,
                             .y_ld = g.y_ld,
                             .out = g.out};
  if (!CublasLtGemm::Fits(p)) return false;
  LaunchQuantise(q.stream(), g.x, g.x_ld, g.rows, g.k, x, x_scale, true);
  return gemm_->Launch(q.stream(), p);
}

}  // namespace sluice::cuda
