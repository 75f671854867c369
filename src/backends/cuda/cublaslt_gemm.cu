#include <cublasLt.h>
#include <dlfcn.h>
#include <glob.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <tuple>
#include <vector>

#include "backends/cuda/cublaslt_gemm.h"

namespace sluice::cuda {
namespace {

// The first release with these scales, as cublasLtGetVersion numbers it.
constexpr size_t kLeast = 120900;
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr int kLeastBucket = 64;

std::string Text(size_t version) {  // 12.9.1 is 120901, 13.1.0 is 130100
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// Where it may lie: what the loader finds, the Python packages of the active environment and of the first
// python3 of PATH, the toolkit.
std::vector<std::string> Candidates() {
  std::vector<std::string> paths(std::begin(kNames), std::end(kNames)), roots;
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    if (const char* active = std::getenv(name); active != nullptr && *active != 0)
      roots.push_back(std::string(active) + "/lib/python3*/site-packages/nvidia/*/lib/");
  }
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    glob_t python{};
    const bool here = glob((folder + "/python3").c_str(), 0, nullptr, &python) == 0;
    globfree(&python);
    if (!here) continue;
    roots.push_back(folder + "/../lib/python3*/site-packages/nvidia/*/lib/");
    break;
  }
  roots.emplace_back("/usr/local/cuda/lib64/");
  for (const std::string& root : roots) {
    for (const char* name : kNames) {
      glob_t found{};
      if (glob((root + name).c_str(), 0, nullptr, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
      }
      globfree(&found);
    }
  }
  return paths;
}

cudaDataType_t TypeOf(Out out) { return out == Out::kAct ? CUDA_R_16BF : CUDA_R_32F; }

int Bucket(int rows) {  // the power of two above
  int bucket = kLeastBucket;
  while (bucket < rows) bucket *= 2;
  return bucket;
}

}  // namespace

struct CublasLtGemm::Library {
  size_t version = 0;
  cublasLtHandle_t handle = nullptr;
  // By outputs, inputs, bytes of an output and bucket of rows.
  std::map<std::tuple<int, int, bool, int>, cublasLtMatmulAlgo_t> algorithms;
#define SLUICE_CUBLASLT_FUNCTIONS(F)       \
  F(cublasLtCreate)                        \
  F(cublasLtDestroy)                       \
  F(cublasLtMatmulDescInit_internal)       \
  F(cublasLtMatmulDescSetAttribute)        \
  F(cublasLtMatrixLayoutInit_internal)     \
  F(cublasLtMatmulPreferenceInit_internal) \
  F(cublasLtMatmulPreferenceSetAttribute)  \
  F(cublasLtMatmulAlgoGetHeuristic)        \
  F(cublasLtMatmul)
#define SLUICE_CUBLASLT_MEMBER(name) decltype(&::name) name = nullptr;
  SLUICE_CUBLASLT_FUNCTIONS(SLUICE_CUBLASLT_MEMBER)
#undef SLUICE_CUBLASLT_MEMBER

  // y^T = w x^T in the library's columns.
  struct Operands {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, y;
  };
  bool Describe(const BlockScaledProduct& p, Operands* o) const {
    bool ok = cublasLtMatmulDescInit_internal(&o->product, sizeof(o->product), CUBLAS_COMPUTE_32F,
                                              CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
    const auto layout = [&](cublasLtMatrixLayoutOpaque_t* to, cudaDataType_t type, int rows, int columns,
                            int64_t ld) {
      ok = ok && cublasLtMatrixLayoutInit_internal(to, sizeof(*to), type, uint64_t(rows), uint64_t(columns),
                                                   ld) == CUBLAS_STATUS_SUCCESS;
    };
    layout(&o->w, CUDA_R_8F_E4M3, p.k, p.n, p.k);
    layout(&o->x, CUDA_R_8F_E4M3, p.k, p.rows, p.k);
    layout(&o->y, TypeOf(p.out), p.n, p.rows, p.y_ld);
    const auto set = [&](cublasLtMatmulDescAttributes_t what, auto value) {
      ok = ok &&
           cublasLtMatmulDescSetAttribute(&o->product, what, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, int32_t(CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, int32_t(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.w_scale);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.x_scale);
    return ok;
  }
  bool Run(cudaStream_t s, const BlockScaledProduct& p, const cublasLtMatmulAlgo_t& algorithm) const {
    Operands o;
    if (!Fits(p) || !Describe(p, &o)) return false;
    const float one = 1, old = p.out == Out::kF32Add ? 1.0f : 0.0f;
    return cublasLtMatmul(handle, &o.product, &one, p.w, &o.w, p.x, &o.x, &old, p.y, &o.y, p.y, &o.y,
                          &algorithm, nullptr, 0, s) == CUBLAS_STATUS_SUCCESS;
  }
};

CublasLtGemm::CublasLtGemm() : lib_(std::make_unique<Library>()) {}
CublasLtGemm::~CublasLtGemm() {
  if (lib_->handle != nullptr) lib_->cublasLtDestroy(lib_->handle);
}

std::string CublasLtGemm::version() const { return Text(lib_->version); }

std::unique_ptr<CublasLtGemm> CublasLtGemm::Open(std::string* why) {
  std::unique_ptr<CublasLtGemm> made(new CublasLtGemm);
  Library& lib = *made->lib_;
  std::string found;  // what was there and does not do
  const auto take = [&](const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return false;
    void* symbol = dlsym(handle, "cublasLtGetVersion");
    lib.version = symbol == nullptr ? 0 : reinterpret_cast<decltype(&::cublasLtGetVersion)>(symbol)();
    Dl_info info{};
    made->path_ =
        symbol != nullptr && dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : path;
    const char* lacks = nullptr;
#define SLUICE_CUBLASLT_FIND(name)                                       \
  lib.name = reinterpret_cast<decltype(lib.name)>(dlsym(handle, #name)); \
  if (lib.name == nullptr && lacks == nullptr) lacks = #name;
    SLUICE_CUBLASLT_FUNCTIONS(SLUICE_CUBLASLT_FIND)
#undef SLUICE_CUBLASLT_FIND
    if (lib.version >= kLeast && lacks == nullptr && lib.cublasLtCreate(&lib.handle) == CUBLAS_STATUS_SUCCESS)
      return true;
    found += (found.empty() ? "" : ", ") + Text(lib.version) + " at " + made->path_ +
             (lib.version < kLeast ? ""
              : lacks != nullptr   ? std::string(" without ") + lacks
                                   : " that does not start");
    dlclose(handle);
    return false;
  };
  for (const std::string& path : Candidates()) {
    if (take(path)) return made;
  }
  *why = "required cuBLASLt " + Text(kLeast) + " or newer, found " + (found.empty() ? "none" : found) +
         "; pip install nvidia-cublas into the Python environment that the server is started from, or put "
         "libcublasLt.so.13 into the loader's path";
  return nullptr;
}

bool CublasLtGemm::Fits(const BlockScaledProduct& p) {
  const auto aligned = [](const void* address) { return (reinterpret_cast<uintptr_t>(address) & 15) == 0; };
  const int64_t item = p.out == Out::kAct ? 2 : 4;
  return p.rows > 0 && p.rows % 4 == 0 && p.n % 16 == 0 && p.k % 128 == 0 && p.y_ld * item % 16 == 0 &&
         aligned(p.x) && aligned(p.w) && aligned(p.y) && aligned(p.x_scale) && aligned(p.w_scale);
}

void CublasLtGemm::Prepare(int n, int k, int max_rows) {
  for (const Out out : {Out::kAct, Out::kF32}) {
    for (int bucket = kLeastBucket; bucket <= Bucket(max_rows); bucket *= 2) {
      const auto key = std::tuple(n, k, out == Out::kAct, bucket);
      if (lib_->algorithms.contains(key)) continue;
      // Scales are named when a kernel is chosen, too; nothing reads them here.
      const float* somewhere = reinterpret_cast<const float*>(uintptr_t(256));
      BlockScaledProduct p{
          .rows = bucket, .n = n, .k = k, .x_scale = somewhere, .w_scale = somewhere, .y_ld = n, .out = out};
      Library::Operands o;
      cublasLtMatmulPreferenceOpaque_t preference;
      const size_t workspace = 0;
      // Splitting inputs needs a workspace, and would make bits depend on the number of rows.
      if (!lib_->Describe(p, &o) ||
          lib_->cublasLtMatmulPreferenceInit_internal(&preference, sizeof(preference)) !=
              CUBLAS_STATUS_SUCCESS ||
          lib_->cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace, sizeof(workspace)) != CUBLAS_STATUS_SUCCESS)
        continue;
      cublasLtMatmulHeuristicResult_t found[1];
      int count = 0;
      if (lib_->cublasLtMatmulAlgoGetHeuristic(lib_->handle, &o.product, &o.w, &o.x, &o.y, &o.y, &preference,
                                               1, found, &count) == CUBLAS_STATUS_SUCCESS &&
          count == 1)
        lib_->algorithms[key] = found[0].algo;
    }
  }
}

void CublasLtGemm::Load(cudaStream_t s, BlockScaledProduct p) const {
  for (const auto& [key, algorithm] : lib_->algorithms) {
    const auto& [n, k, act, bucket] = key;
    if (n != p.n || k != p.k) continue;
    p.out = act ? Out::kAct : Out::kF32;
    (void)lib_->Run(s, p, algorithm);  // what it refuses here it refuses in a step
  }
}

bool CublasLtGemm::Launch(cudaStream_t s, const BlockScaledProduct& p) const {
  const auto algorithm = lib_->algorithms.find(std::tuple(p.n, p.k, p.out == Out::kAct, Bucket(p.rows)));
  return algorithm != lib_->algorithms.end() && lib_->Run(s, p, algorithm->second);
}

}  // namespace sluice::cuda
