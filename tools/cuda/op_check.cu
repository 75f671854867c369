// Checks every CUDA kernel against double-precision sums at the shapes of GLM-5 and at degenerate ones, and
// times it against what bounds it. Needs nothing but the CUDA toolkit.
#include "tools/cuda/check.h"

namespace sluice::cuda {

__global__ void ReadPass(const float4* p, size_t n, float* out) {
  float s = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    const float4 v = __ldcs(p + i);
    s += v.x + v.y + v.z + v.w;
  }
  if (s == 1.2345f) *out = s;
}

// Device memory and pinned memory that the ceilings and the page copies share.
struct Arenas {
  static constexpr size_t kDevice = size_t(2) << 30, kHost = size_t(1) << 30;
  Dev<char> a{kDevice}, b{kDevice};
  char* host = nullptr;
  Arenas() {
    CUDA_OK(cudaMemset(a.p, 3, kDevice));
    CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&host), kHost, cudaHostAllocMapped));
    std::memset(host, 1, kHost);
  }
  ~Arenas() { cudaFreeHost(host); }
};

static void Ceilings(Arenas* arenas) {
  Dev<char>&a = arenas->a, &b = arenas->b;
  char* const host = arenas->host;
  const size_t bytes = Arenas::kDevice;
  const double ms =
      Time([&] { CUDA_OK(cudaMemcpyAsync(b.p, a.p, bytes, cudaMemcpyDeviceToDevice, stream)); }, 7);
  copy_gbs = 2.0 * bytes / ms / 1e6;
  Dev<float> out(1);
  const double rms = Time(
      [&] {
        ReadPass<<<132 * 16, 512, 0, stream>>>(reinterpret_cast<const float4*>(a.p), bytes / 16, out.p);
      },
      7);
  read_gbs = bytes / rms / 1e6;
  h2d_gbs = (1 << 30) /
            Time([&] { CUDA_OK(cudaMemcpyAsync(a.p, host, 1 << 30, cudaMemcpyHostToDevice, stream)); }, 5) /
            1e6;
  d2h_gbs = (1 << 30) /
            Time([&] { CUDA_OK(cudaMemcpyAsync(host, a.p, 1 << 30, cudaMemcpyDeviceToHost, stream)); }, 5) /
            1e6;
  Say("CEILING device copy %.0f GB/s (read + write), one read pass %.0f GB/s, H2D %.1f, D2H %.1f GB/s\n",
      copy_gbs, read_gbs, h2d_gbs, d2h_gbs);
}

static void PageCopies(Arenas* arenas) {
  Dev<char>&a = arenas->a, &b = arenas->b;
  char* const host = arenas->host;
  const size_t bytes = Arenas::kDevice;
  for (const int64_t bytes_page : {41984, 8448}) {
    for (const int pages : {4096, 256}) {
      const int total = int((size_t(1) << 30) / bytes_page);
      std::vector<int32_t> si(pages), di(pages), all(total);
      std::iota(all.begin(), all.end(), 0);
      std::mt19937 rng(5);
      std::shuffle(all.begin(), all.end(), rng);
      std::copy_n(all.begin(), pages, si.begin());
      std::shuffle(all.begin(), all.end(), rng);
      std::copy_n(all.begin(), pages, di.begin());
      Dev<int32_t> dsi(si), ddi(di);
      for (size_t i = 0; i < (size_t(1) << 30) / 8; i += 64) reinterpret_cast<uint64_t*>(host)[i] = Mix(i);
      for (const bool to_device : {true, false}) {
        const std::byte* src = reinterpret_cast<const std::byte*>(to_device ? host : a.p);
        std::byte* dst = reinterpret_cast<std::byte*>(to_device ? a.p : host);
        if (!to_device) {
          CUDA_OK(cudaMemcpy(b.p, host, size_t(1) << 30, cudaMemcpyHostToDevice));
          CUDA_OK(cudaMemcpy(a.p, b.p, size_t(1) << 30, cudaMemcpyDeviceToDevice));
        }
        for (const int blocks : {8, 16, 32}) {
          const double t = Time(
              [&] {
                LaunchPageCopy(stream, src, bytes_page, dsi.p, dst, bytes_page, ddi.p, pages, bytes_page,
                               blocks);
              },
              7);
          char shape[64];
          std::snprintf(shape, sizeof(shape), "%lld B x %d, %d blocks", (long long)bytes_page, pages, blocks);
          Row(to_device ? "page copy H2D" : "page copy D2H", shape, t, pages * double(bytes_page) / t / 1e6,
              "GB/s", to_device ? h2d_gbs : d2h_gbs, "link");
        }
        Done();
        double bad = 0;
        std::vector<char> page(bytes_page);
        for (int i = 0; i < pages; i += 37) {
          CUDA_OK(cudaMemcpy(page.data(), reinterpret_cast<char*>(dst) + int64_t(di[i]) * bytes_page,
                             bytes_page, cudaMemcpyDefault));
          std::vector<char> want(bytes_page);
          CUDA_OK(cudaMemcpy(want.data(), reinterpret_cast<const char*>(src) + int64_t(si[i]) * bytes_page,
                             bytes_page, cudaMemcpyDefault));
          bad += std::memcmp(page.data(), want.data(), bytes_page) != 0;
        }
        Check(to_device ? "page copy H2D bytes" : "page copy D2H bytes", bad, 0);
      }
    }
  }
  {  // own memory: gather of random pages
    const int64_t page = 41984;
    const int n = 16384, total = int(bytes / page);
    std::vector<int32_t> si(n), di(n), all(total);
    std::iota(all.begin(), all.end(), 0);
    std::mt19937 rng(6);
    std::shuffle(all.begin(), all.end(), rng);
    std::copy_n(all.begin(), n, si.begin());
    std::iota(di.begin(), di.end(), 0);
    Dev<int32_t> dsi(si), ddi(di);
    Fill(reinterpret_cast<float*>(a.p), bytes / 4, 3);
    for (const int blocks : {0, 132}) {
      const double t = Time([&] {
        LaunchPageCopy(stream, (std::byte*)a.p, page, dsi.p, (std::byte*)b.p, page, ddi.p, n, page, blocks);
      });
      char shape[64];
      std::snprintf(shape, sizeof(shape), "41984 B x %d, %d blocks (0: all)", n, blocks);
      Row("page gather D2D", shape, t, 2.0 * n * page / t / 1e6, "GB/s", copy_gbs, "copy");
    }
    CUDA_OK(cudaMemsetAsync(b.p, 0, bytes, stream));
    LaunchPageCopy(stream, (std::byte*)a.p, page, dsi.p, (std::byte*)b.p, page, ddi.p, n, page, 0);
    Done();
    double bad = 0;
    std::vector<char> x(page), y(page);
    for (int i = 0; i < n; i += 131) {
      CUDA_OK(cudaMemcpy(x.data(), b.p + i * page, page, cudaMemcpyDeviceToHost));
      CUDA_OK(cudaMemcpy(y.data(), a.p + int64_t(si[i]) * page, page, cudaMemcpyDeviceToHost));
      bad += x != y;
    }
    Check("page gather D2D bytes", bad, 0);
  }
}

static void Norms() {
  for (const auto& [rows, dim] : {std::pair{4096, 6144}, {64, 6144}, {1, 2048}, {3, 384}, {5, 257}}) {
    Dev<float> x(size_t(rows) * dim), w(dim), yf(size_t(rows) * dim);
    Dev<__nv_bfloat16> y(size_t(rows) * dim);
    Fill(x.p, x.n, 11);
    Fill(w.p, w.n, 12);
    y.Poison();
    LaunchRmsNorm(stream, x.p, dim, w.p, 1e-5f, rows, dim, y.p, dim, false, yf.p);
    Done();
    double diff = 0, ref = 0;
    const auto wh = w.Get();
    for (int r = 0; r < rows; r += std::max(1, rows / 50)) {
      const auto xr = x.Get(size_t(r) * dim, dim);
      const auto yr = y.Get(size_t(r) * dim, dim);
      const auto fr = yf.Get(size_t(r) * dim, dim);
      double sum = 0;
      for (float v : xr) sum += double(v) * v;
      const double scale = 1 / std::sqrt(sum / dim + 1e-5);
      for (int i = 0; i < dim; ++i) {
        const double want = xr[i] * scale * wh[i];
        diff += std::pow(BF(yr[i]) - want, 2) + std::pow((fr[i] - want) * 1e3, 2);
        ref += want * want;
      }
    }
    char name[64];
    std::snprintf(name, sizeof(name), "rms norm %d x %d", rows, dim);
    Check(name, Norm2(diff, ref), 3e-3);
    if (rows == 4096) {
      const double t =
          Time([&] { LaunchRmsNorm(stream, x.p, dim, w.p, 1e-5f, rows, dim, y.p, dim, false, nullptr); }, 11,
               Flush::kRead);
      Row("rms norm", "4096 x 6144 f32 -> bf16", t, 6.0 * rows * dim / t / 1e6, "GB/s", copy_gbs, "copy");
    }
  }
}

// Positions go round every `positions` rows.
static void WriteRows(int rows, bool interleave, Elem format, int positions) {
  const int pages = rows / 64 + 16;
  const bool fp8 = format == Elem::kE4M3;
  const int row_bytes = fp8 ? 656 : 1152;
  Ropes ropes(positions, interleave);
  std::vector<int32_t> page(rows), offset(rows), position(rows);
  for (int r = 0; r < rows; ++r) {
    page[r] = 1 + (r / 64 * 7) % (rows / 64 + 15);
    offset[r] = r % 64;
    position[r] = r % positions;
  }
  page[5] = -1;
  Dev<int32_t> dp(page), dofs(offset), dpos(position);
  Dev<float> ckv(size_t(rows) * 2752), norm(512), inorm(128), ibias(128);
  Fill(ckv.p, ckv.n, 21);
  Fill(norm.p, 512, 22);
  Fill(inorm.p, 128, 23);
  Fill(ibias.p, 128, 24);
  Dev<uint8_t> latent(size_t(pages) * 64 * row_bytes), index(size_t(pages) * 8448);
  latent.Poison();
  index.Poison();
  const Slab ls{(std::byte*)latent.p, int64_t(latent.n), 64 * row_bytes, 1, format},
      is{(std::byte*)index.p, int64_t(index.n), 8448, 1, Elem::kE4M3};
  LaunchWriteLatent(stream, ckv.p + 2048, 2752, norm.p, 1e-5f, dpos.p, ropes.rope, dp.p, dofs.p, rows, 512,
                    64, ls);
  LaunchWriteIndex(stream, ckv.p + 2624, 2752, inorm.p, ibias.p, 1e-6f, dpos.p, ropes.rope, dp.p, dofs.p,
                   rows, 128, 64, is);
  Done();
  const auto lat = latent.Get();
  const auto idx = index.Get();
  const auto nh = norm.Get();
  const auto in = inorm.Get(), ib = ibias.Get();
  const auto ch = ropes.cos.Get(), sh = ropes.sin.Get();
  double diff = 0, ref = 0, idiff = 0, iref = 0;
  for (int r = 0; r < rows; r += rows / 256 + 1) {
    if (page[r] < 0) continue;
    const auto x = ckv.Get(size_t(r) * 2752 + 2048, 704);
    double sum = 0;
    for (int i = 0; i < 512; ++i) sum += double(x[i]) * x[i];
    const double scale = 1 / std::sqrt(sum / 512 + 1e-5);
    const uint8_t* row = lat.data() + size_t(page[r]) * 64 * row_bytes + offset[r] * row_bytes;
    for (int i = 0; i < 512; ++i) {
      const double want = x[i] * scale * nh[i];
      double got;
      if (fp8) {
        float s;
        std::memcpy(&s, row + 512 + i / 128 * 4, 4);
        got = E4(row[i]) * s;
      } else {
        uint16_t v;
        std::memcpy(&v, row + 2 * i, 2);
        got = BF(v);
      }
      diff += (got - want) * (got - want);
      ref += want * want;
    }
    for (int i = 0; i < 32; ++i) {
      uint16_t a, b;
      const int ia = interleave ? 2 * i : i, ib = interleave ? 2 * i + 1 : i + 32;
      std::memcpy(&a, row + row_bytes - 128 + 2 * ia, 2);
      std::memcpy(&b, row + row_bytes - 128 + 2 * ib, 2);
      const double c = ch[size_t(position[r]) * 32 + i], s = sh[size_t(position[r]) * 32 + i];
      const double wa = x[512 + ia] * c - x[512 + ib] * s, wb = x[512 + ib] * c + x[512 + ia] * s;
      diff += std::pow((BF(a) - wa) * 8, 2) + std::pow((BF(b) - wb) * 8, 2);
      ref += wa * wa + wb * wb;
    }
    double mean = 0, var = 0, y[128];
    for (int i = 0; i < 128; ++i) mean += x[576 + i] / 128.0;
    for (int i = 0; i < 128; ++i) var += std::pow(x[576 + i] - mean, 2) / 128.0;
    for (int i = 0; i < 128; ++i) y[i] = (x[576 + i] - mean) / std::sqrt(var + 1e-6) * in[i] + ib[i];
    for (int i = 0; i < 32; ++i) {
      const int ia = interleave ? 2 * i : i, ib = interleave ? 2 * i + 1 : i + 32;
      const double c = ch[size_t(position[r]) * 32 + i], s = sh[size_t(position[r]) * 32 + i], a = y[ia],
                   b = y[ib];
      y[ia] = a * c - b * s;
      y[ib] = b * c + a * s;
    }
    const uint8_t* block = idx.data() + size_t(page[r]) * 8448;
    float s;
    std::memcpy(&s, block + 8192 + offset[r] * 4, 4);
    for (int i = 0; i < 128; ++i) {
      const double got = E4(block[offset[r] * 128 + i]) * s;
      idiff += (got - y[i]) * (got - y[i]);
      iref += y[i] * y[i];
    }
  }
  char name[96], shape[64];
  std::snprintf(name, sizeof(name), "latent rows %s, %d%s", fp8 ? "fp8 (e4m3 rounding is 2.6e-2)" : "bf16",
                rows, interleave ? "" : ", halves turned");
  Check(name, Norm2(diff, ref), fp8 ? 4e-2 : 6e-3);
  std::snprintf(name, sizeof(name), "index rows fp8, %d%s", rows, interleave ? "" : ", halves turned");
  Check(name, Norm2(idiff, iref), 4e-2);
  double touched = 0;  // of the row that has no page
  for (size_t i = 0; i < size_t(row_bytes); ++i)
    touched += lat[size_t(page[4]) * 64 * row_bytes + 5 * size_t(row_bytes) + i] != 0xff;
  Check("  a row without a page writes nothing", touched, 0);
  if (!interleave || !fp8) return;
  const double t = Time(
      [&] {
        LaunchWriteLatent(stream, ckv.p + 2048, 2752, norm.p, 1e-5f, dpos.p, ropes.rope, dp.p, dofs.p, rows,
                          512, 64, ls);
      },
      11, Flush::kRead);
  // Each input is read once: the row, its page, place and position, and the angles of each position.
  const double angles = positions * 256.0, places = rows * 12.0;
  std::snprintf(shape, sizeof(shape), "%d rows of 656 B, %d positions", rows, positions);
  Row("norm+rope+pack+scatter", shape, t, (rows * (576 * 4.0 + 656) + angles + places) / t / 1e6, "GB/s",
      copy_gbs, "copy");
  Row("  rows alone counted", shape, t, rows * (576 * 4.0 + 656) / t / 1e6, "GB/s", copy_gbs, "copy");
  const double ti = Time(
      [&] {
        LaunchWriteIndex(stream, ckv.p + 2624, 2752, inorm.p, ibias.p, 1e-6f, dpos.p, ropes.rope, dp.p,
                         dofs.p, rows, 128, 64, is);
      },
      11, Flush::kRead);
  std::snprintf(shape, sizeof(shape), "%d rows of 132 B, %d positions", rows, positions);
  Row("index row write", shape, ti, (rows * (128 * 4.0 + 132) + angles + places) / ti / 1e6, "GB/s", copy_gbs,
      "copy");
}

static __global__ void Nothing() {}

static void Writes() {
  Say("a launch of nothing takes %.2f us\n",
      Time([] { Nothing<<<1, 32, 0, stream>>>(); }, 21, Flush::kRead) * 1e3);
  WriteRows(4096, true, Elem::kE4M3, 4096);
  WriteRows(4096, false, Elem::kE4M3, 4096);
  WriteRows(4096, true, Elem::kBF16, 4096);
  WriteRows(16384, true, Elem::kE4M3, 4096);
  WriteRows(32768 + 5, false, Elem::kBF16, 4096);
  WriteRows(32768 + 5, false, Elem::kE4M3, 4096);
  WriteRows(65536, true, Elem::kE4M3, 65536);
  WriteRows(65536, true, Elem::kE4M3, 4096);
}

struct Part {
  std::string name;
  void (*run)();
};
static const std::vector<Part> kParts = {{"norms", Norms},
                                         {"writes", Writes},
                                         {"gemms", CheckGemms},
                                         {"peer", CheckPeer},
                                         {"indexer", CheckIndexer},
                                         {"topk", CheckTopK},
                                         {"attention", CheckAttention},
                                         {"experts", CheckExperts},
                                         {"sampling", CheckSampling},
                                         {"degenerate", CheckDegenerate}};

const std::vector<std::string>& OpParts() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> n = {"pages"};
    for (const Part& part : kParts) n.push_back(part.name);
    return n;
  }();
  return names;
}

bool RunOpCatalogue(const OpCatalogueOptions& with, OpReport* into) {
  options = with;
  report = into;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return false;
  cudaDeviceProp prop;
  CUDA_OK(cudaGetDeviceProperties(&prop, 0));
  report->device = prop.name;
  report->multiprocessors = prop.multiProcessorCount;
  report->l2_mb = int(prop.l2CacheSize >> 20);
  Say("%s, %d multiprocessors, L2 %d MB\n", prop.name, prop.multiProcessorCount, report->l2_mb);
  CUDA_OK(cudaStreamCreate(&stream));
  const auto wanted = [&](const std::string& name) { return name.find(options.only) != std::string::npos; };
  {
    Arenas arenas;
    Ceilings(&arenas);
    if (wanted("pages")) PageCopies(&arenas);
  }
  report->copy_gbs = copy_gbs;
  report->read_gbs = read_gbs;
  report->h2d_gbs = h2d_gbs;
  report->d2h_gbs = d2h_gbs;
  for (const Part& part : kParts) {
    if (!wanted(part.name)) continue;
    Say("---- %s\n", part.name.c_str());
    part.run();
  }
  CUDA_OK(cudaStreamDestroy(stream));
  return true;
}

}  // namespace sluice::cuda
