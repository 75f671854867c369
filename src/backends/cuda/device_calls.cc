#include "backends/cuda/device_calls.h"

#include <cuda_runtime.h>

namespace sluice::cuda {
namespace {

thread_local bool counting = false;
thread_local DeviceCalls calls;

void CountAllocation(const char* name) {
  if (!counting) return;
  ++calls.allocations;
  calls.allocation = name;
}
void CountQuery(const char* name) {
  if (!counting) return;
  ++calls.queries;
  calls.query = name;
}
void CountWait(const char* name) {
  if (!counting) return;
  ++calls.waits;
  calls.wait = name;
}

}  // namespace

void BeginDeviceCalls() {
  calls = {};
  counting = true;
}

DeviceCalls EndDeviceCalls() {
  counting = false;
  return calls;
}

UncountedDeviceCalls::UncountedDeviceCalls() : counted_(counting) { counting = false; }
UncountedDeviceCalls::~UncountedDeviceCalls() { counting = counted_; }

}  // namespace sluice::cuda

// The list is that of the link options in CMakeLists.txt.
using namespace sluice::cuda;  // NOLINT: the functions below have C's names
#define SLUICE_WRAP(count, name, parameters, arguments) \
  cudaError_t __real_##name parameters;                 \
  cudaError_t __wrap_##name parameters {                \
    count(#name);                                       \
    return __real_##name arguments;                     \
  }
extern "C" {
SLUICE_WRAP(CountAllocation, cudaMalloc, (void** p, size_t n), (p, n))
SLUICE_WRAP(CountAllocation, cudaMallocAsync, (void** p, size_t n, cudaStream_t s), (p, n, s))
SLUICE_WRAP(CountAllocation, cudaFree, (void* p), (p))
SLUICE_WRAP(CountAllocation, cudaFreeAsync, (void* p, cudaStream_t s), (p, s))
SLUICE_WRAP(CountAllocation, cudaHostAlloc, (void** p, size_t n, unsigned flags), (p, n, flags))
SLUICE_WRAP(CountAllocation, cudaMallocHost, (void** p, size_t n), (p, n))
SLUICE_WRAP(CountAllocation, cudaFreeHost, (void* p), (p))
SLUICE_WRAP(CountAllocation, cudaHostRegister, (void* p, size_t n, unsigned flags), (p, n, flags))
SLUICE_WRAP(CountAllocation, cudaHostUnregister, (void* p), (p))
SLUICE_WRAP(CountQuery, cudaMemGetInfo, (size_t * free, size_t* total), (free, total))
SLUICE_WRAP(CountQuery, cudaPointerGetAttributes, (cudaPointerAttributes * a, const void* p), (a, p))
SLUICE_WRAP(CountWait, cudaDeviceSynchronize, (), ())
SLUICE_WRAP(CountWait, cudaStreamSynchronize, (cudaStream_t s), (s))
SLUICE_WRAP(CountWait, cudaEventSynchronize, (cudaEvent_t e), (e))
SLUICE_WRAP(CountWait, cudaStreamQuery, (cudaStream_t s), (s))
SLUICE_WRAP(CountWait, cudaEventQuery, (cudaEvent_t e), (e))
SLUICE_WRAP(CountWait, cudaMemcpy, (void* d, const void* s, size_t n, cudaMemcpyKind k), (d, s, n, k))
SLUICE_WRAP(CountWait, cudaMemset, (void* d, int v, size_t n), (d, v, n))
}
#undef SLUICE_WRAP
