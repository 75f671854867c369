#include "base/stream_copy.h"

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {
#if defined(__x86_64__)
namespace {

constexpr size_t kLine = 64;
constexpr size_t kAhead = 1024;  // prefetched before it is read

// Both: `to` is on a line, `lines` of 64 bytes.
__attribute__((target("avx512f"))) void Lines512(std::byte* to, const std::byte* from, size_t lines) {
  for (; lines >= 4; lines -= 4, to += 4 * kLine, from += 4 * kLine) {
    for (size_t i = 0; i < 4; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + i * kLine), _MM_HINT_NTA);
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + kLine),
                  c = _mm512_loadu_si512(from + 2 * kLine), d = _mm512_loadu_si512(from + 3 * kLine);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 2 * kLine), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 3 * kLine), d);
  }
  for (; lines > 0; --lines, to += kLine, from += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

void Lines128(std::byte* to, const std::byte* from, size_t lines) {
  for (; lines > 0; --lines, to += kLine, from += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_NTA);
    __m128i v[4];
    for (size_t i = 0; i < 4; ++i) v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i));
    for (size_t i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16 * i), v[i]);
  }
}

}  // namespace

void StreamCopy(void* to, const void* from, size_t bytes) {
  static const bool wide = __builtin_cpu_supports("avx512f");
  auto* t = static_cast<std::byte*>(to);
  auto* f = static_cast<const std::byte*>(from);
  const size_t head = size_t(-reinterpret_cast<uintptr_t>(t)) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(t, f, bytes);
    return;
  }
  std::memcpy(t, f, head);
  const size_t lines = (bytes - head) / kLine, tail = (bytes - head) % kLine;
  (wide ? Lines512 : Lines128)(t + head, f + head, lines);
  std::memcpy(t + bytes - tail, f + bytes - tail, tail);
  _mm_sfence();  // streamed stores are not ordered with the ones that announce them
}
#else
void StreamCopy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace sluice
