#include "kv/page_copier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.h"
#include "kv/device_memory_fixture.h"
#include "kv/layout_fixture.h"

namespace sluice {
namespace {

using testing::FakeDeviceMemory;
using ::testing::HasSubstr;
using testing::MakeLayout;
using testing::Small;

constexpr HostLayout kLayouts[] = {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                   HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst};
constexpr IoBackend kBackends[] = {IoBackend::kDirect, IoBackend::kKernel};

std::string_view Name(IoBackend b) { return b == IoBackend::kDirect ? "direct" : "kernel"; }
bool Legal(HostLayout layout, IoBackend backend) { return CheckHostLayout(layout, Name(backend)).ok(); }

std::vector<std::byte> Bytes(const DevicePool& pool, PageId page) {
  std::vector<std::byte> bytes;
  for (const KvPiece& piece : pool.layout().pieces())
    bytes.insert(bytes.end(), pool.Piece(piece, page), pool.Piece(piece, page) + piece.bytes);
  return bytes;
}

void Fill(const DevicePool& pool, PageId page, uint64_t seed) {
  SeededStream random(seed);
  for (const KvPiece& piece : pool.layout().pieces())
    for (int64_t i = 0; i < piece.bytes; ++i) pool.Piece(piece, page)[i] = std::byte(random.Next());
}

// Pages out, layer by layer back to other places, in one of the two ways. A layer moves nothing of another.
void RoundTrip(FakeDeviceMemory* memory, HostLayout order, IoBackend backend, DType index, int32_t lanes,
               int64_t host_pages) {
  SCOPED_TRACE(fmt::format("{} {} index {} lanes {} host pages {}", Name(order), Name(backend), Name(index),
                           lanes, host_pages));
  const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, index, true);
  const auto device = DevicePool::Make(layout, lanes, 9, memory).value();
  const auto host = HostPool::Make(layout, order, lanes, host_pages, memory).value();
  const auto copier = PlanCopier::Make(backend, *device, *host).value();
  CopyPlan down{1, CopyDirection::kDeviceToHost, {}}, up{2, CopyDirection::kHostToDevice, {}};
  for (int32_t local = 1; local <= 4; ++local) {
    for (int32_t lane = 0; lane < lanes; ++lane) {
      const PageId from(local * lanes + lane), to((local + 4) * lanes + lane);
      const HostPageId at(int32_t(host_pages - local) * lanes + lane);
      Fill(*device, from, uint64_t(from.value) + 1);
      down.pages.push_back({from, at});
      up.pages.push_back({to, at});
    }
  }
  copier->Begin({&down, 1});
  EXPECT_EQ(copier->All().bytes, int64_t(down.pages.size()) * layout.page_bytes());
  copier->Begin({&up, 1});
  for (const PagePair& pair : up.pages) Fill(*device, pair.device, 999);
  for (const LogicalLayer layer : layout.layers()) {
    int64_t bytes = 0;
    for (const KvPiece& piece : layout.pieces()) bytes += piece.layer == layer ? piece.bytes : 0;
    EXPECT_EQ(copier->Layer(layer).bytes, int64_t(up.pages.size()) * bytes);
  }
  for (size_t i = 0; i < up.pages.size(); ++i)
    EXPECT_EQ(Bytes(*device, up.pages[i].device), Bytes(*device, down.pages[i].device));
}

TEST(PageCopier, PagesComeBackByEveryLegalPairOfLayoutAndBackend) {
  FakeDeviceMemory memory;
  int pairs = 0;
  for (const HostLayout order : kLayouts) {
    for (const IoBackend backend : kBackends) {
      if (!Legal(order, backend)) continue;
      ++pairs;
      for (const DType index : {DType::kBF16, DType::kF8E4M3})
        for (const int32_t lanes : {1, 3}) RoundTrip(&memory, order, backend, index, lanes, 7);
    }
  }
  EXPECT_EQ(pairs, 5);
  EXPECT_EQ(memory.pinned_ranges(), 0);
}

TEST(PageCopier, APairWithoutACopierIsRefusedAndNamed) {
  FakeDeviceMemory memory;
  const KvLayout layout = MakeLayout(Small());
  const auto device = DevicePool::Make(layout, 1, 4, &memory).value();
  for (const HostLayout order : kLayouts) {
    const auto host = HostPool::Make(layout, order, 1, 4, &memory).value();
    for (const IoBackend backend : kBackends) {
      const auto copier = PlanCopier::Make(backend, *device, *host);
      ASSERT_EQ(copier.ok(), Legal(order, backend)) << Name(order) << " " << Name(backend);
      if (!copier.ok()) {
        EXPECT_THAT(std::string(Message(copier.status())), HasSubstr(std::string(Name(order))));
        EXPECT_THAT(std::string(Message(copier.status())), HasSubstr(std::string(Name(backend))));
      }
    }
  }
  const auto in_host_memory = DevicePool::Make(layout, 1, 4).value();
  const auto host = HostPool::Make(layout, HostLayout::kLayerFirst, 1, 4).value();
  EXPECT_FALSE(KernelCopier::Make(*in_host_memory, *host).ok());
}

TEST(DirectCopier, KeepsTheCallersOrderAndMergesNeighbours) {
  FakeDeviceMemory memory;
  const KvLayout layout = MakeLayout(Small());
  const auto device = DevicePool::Make(layout, 1, 32, &memory).value();
  const auto host = HostPool::Make(layout, HostLayout::kLayerFirst, 1, 32, &memory).value();
  const DirectCopier copier = DirectCopier::Make(*device, *host).value();
  // Three runs: 9..11, then 2..3 (before it in both pools), then 4 (its host page is no neighbour).
  const std::vector<int64_t> d = {9, 10, 11, 2, 3, 4}, h = {20, 21, 22, 5, 6, 30};
  const CopyCount n = copier.Copy(CopyDirection::kDeviceToHost, d, h, LogicalLayer(1)).value();
  ASSERT_EQ(memory.run_calls.size(), 1u);
  int64_t pieces = 0;
  for (const KvPiece& piece : layout.pieces()) {
    if (piece.layer != LogicalLayer(1)) continue;
    const auto& runs = memory.run_calls[0];
    for (const auto& [at, page, pages] : {std::tuple{0, 9, 3}, {1, 2, 2}, {2, 4, 1}}) {
      EXPECT_EQ(runs[size_t(3 * pieces + at)].src, device->Piece(piece, PageId(page)));
      EXPECT_EQ(runs[size_t(3 * pieces + at)].bytes, pages * piece.bytes);
    }
    ++pieces;
  }
  EXPECT_EQ(n.copies, 3 * pieces);
}

TEST(DirectCopier, RefusesAListOnTheDeviceAndPagesThatAreNotThere) {
  FakeDeviceMemory memory;
  const KvLayout layout = MakeLayout(Small());
  const auto device = DevicePool::Make(layout, 2, 4, &memory).value();
  const auto host = HostPool::Make(layout, HostLayout::kLayerPageFirst, 2, 4, &memory).value();
  const DirectCopier copier = DirectCopier::Make(*device, *host).value();
  const auto list = memory.Allocate(2 * 8, "list").value();
  const std::span<const int64_t> on_device(reinterpret_cast<const int64_t*>(list.get()), 2);
  const std::vector<int64_t> pages = {2, 3}, far = {2, 8}, below = {2, -1}, crossed = {3, 2};
  const auto why = [&](std::span<const int64_t> d, std::span<const int64_t> h) {
    const auto done = copier.Copy(CopyDirection::kHostToDevice, d, h);
    EXPECT_FALSE(done.ok());
    return std::string(Message(done.status()));
  };
  EXPECT_THAT(why(on_device, pages), HasSubstr("lies in device memory"));
  EXPECT_THAT(why(pages, on_device), HasSubstr("--hicache-io-backend kernel"));
  EXPECT_THAT(why(far, pages), HasSubstr("device page 8 is outside of the 8 pages"));
  EXPECT_THAT(why(pages, far), HasSubstr("host page 8"));
  EXPECT_THAT(why(below, pages), HasSubstr("-1"));
  EXPECT_THAT(why(crossed, pages), HasSubstr("different lanes"));
  EXPECT_THAT(why({pages.data(), 1}, pages), HasSubstr("1 device pages and 2 host pages"));
  EXPECT_TRUE(memory.run_calls.empty());
}

TEST(KernelCopier, RefusesAListInHostMemory) {
  FakeDeviceMemory memory;
  const KvLayout layout = MakeLayout(Small());
  const auto device = DevicePool::Make(layout, 1, 4, &memory).value();
  const auto host = HostPool::Make(layout, HostLayout::kPageFirst, 1, 4, &memory).value();
  const KernelCopier copier = KernelCopier::Make(*device, *host).value();
  const int32_t list[] = {1, 2};
  const auto done = copier.Copy(CopyDirection::kDeviceToHost, 0, list, list, 2);
  ASSERT_FALSE(done.ok());
  EXPECT_THAT(std::string(Message(done.status())), HasSubstr("lies in host memory"));
  EXPECT_EQ(memory.indexed_calls, 0);
}

TEST(PinnedMemory, AHundredPoolsOfOtherSizesAndLayoutsLeaveNoRegistration) {
  FakeDeviceMemory memory;
  const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, DType::kF8E4M3, true);
  std::unique_ptr<HostPool> kept;  // some live beside the next one
  for (int i = 0; i < 100; ++i) {
    auto pool = HostPool::Make(layout, kLayouts[i % 4], 1 + i % 3, 1 + (i * 7) % 40, &memory);
    ASSERT_TRUE(pool.ok()) << Message(pool.status());
    EXPECT_EQ(memory.pinned_ranges(), kept != nullptr ? 2 : 1);
    kept = i % 3 == 0 ? std::move(*pool) : nullptr;
  }
  kept.reset();
  EXPECT_EQ(memory.pinned_ranges(), 0);
}

}  // namespace
}  // namespace sluice
