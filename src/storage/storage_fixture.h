// What the tests of the storage backends share: pages with known bytes, a private directory, one-call
// helpers.
#pragma once

#include <stdlib.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "gtest/gtest.h"
#include "storage/storage.h"

namespace sluice {

inline Digest256 TestKey(uint64_t i) {
  Hasher h;
  h.AddU64(i);
  return h.Finish();
}

// Odd sizes on purpose; bytes depend on the key and the position.
inline StorageFormat TestFormat(std::vector<uint32_t> pieces = {41'984, 8'448, 41'984, 1, 700'001}) {
  StorageFormat f;
  f.content_fingerprint = TestKey(~0ull);
  f.piece_bytes = std::move(pieces);
  return f;
}

struct TestPage {
  std::vector<std::vector<std::byte>> pieces;

  TestPage(const StorageFormat& format, uint64_t key) {
    for (uint32_t n : format.piece_bytes) pieces.emplace_back(n);
    uint64_t x = key * 0x9E3779B97F4A7C15ull + 1;
    for (auto& p : pieces)
      for (auto& b : p) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        b = std::byte(uint8_t(x >> 56));
      }
  }
  explicit TestPage(const StorageFormat& format) {
    for (uint32_t n : format.piece_bytes) pieces.emplace_back(n, std::byte{0xEE});
  }
  StorageItem Item(uint64_t key) {
    StorageItem item{TestKey(key), {}};
    for (auto& p : pieces) item.spans.emplace_back(p);
    return item;
  }
};

class TempDirectory {
 public:
  TempDirectory() {
    char name[] = "/tmp/sluice-storage-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline StorageCompletion Await(StorageBackend* s, StorageTicket ticket,
                               std::chrono::milliseconds limit = std::chrono::seconds(20)) {
  std::vector<StorageCompletion> done;
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    if (s->Poll(&done, 1) == 1) {
      EXPECT_EQ(done[0].ticket, ticket);
      return std::move(done[0]);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  ADD_FAILURE() << "no completion";
  return {};
}

inline std::vector<StorageOutcome> RunBatch(StorageBackend* s, StorageOp op, std::vector<StorageItem> items,
                                            Nanos deadline = 0) {
  auto t = s->Submit({op, std::move(items), deadline});
  EXPECT_TRUE(t.ok()) << t.status();
  return t.ok() ? Await(s, *t).outcomes : std::vector<StorageOutcome>{};
}

inline StorageOutcome PutPage(StorageBackend* s, uint64_t key) {
  TestPage page(s->format(), key);
  auto o = RunBatch(s, StorageOp::kPut, {page.Item(key)});
  return o.empty() ? StorageOutcome::kError : o[0];
}

// Gets and, on kOk, checks the bytes.
inline StorageOutcome GetPage(StorageBackend* s, uint64_t key, Nanos deadline = 0) {
  TestPage want(s->format(), key), got(s->format());
  auto o = RunBatch(s, StorageOp::kGet, {got.Item(key)}, deadline);
  if (o.empty()) return StorageOutcome::kError;
  if (o[0] == StorageOutcome::kOk && want.pieces != got.pieces)
    ADD_FAILURE() << "wrong bytes for key " << key;
  return o[0];
}

}  // namespace sluice
