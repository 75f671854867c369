#include "exec/copy_worker.h"

#include <cstring>

#include "gtest/gtest.h"
#include "kv/layout_fixture.h"

namespace sluice {
namespace {

class CopyWorkerTest : public ::testing::TestWithParam<HostLayout> {
 protected:
  const KvLayout layout_ = testing::MakeLayout(testing::Small());
  const std::unique_ptr<DevicePool> device_ = DevicePool::Make(layout_, 1, 9).value();
  const std::unique_ptr<HostPool> host_ = HostPool::Make(layout_, GetParam(), 1, 16).value();

  static IoBackend Backend() {
    return GetParam() == HostLayout::kPageFirst ? IoBackend::kKernel : IoBackend::kDirect;
  }
  void Fill(PageId page, int value) {
    int k = value;
    for (const KvPiece& piece : layout_.pieces())
      std::memset(device_->Piece(piece, page), k++, size_t(piece.bytes));
  }
  bool Holds(PageId page, int value) {
    int k = value;
    for (const KvPiece& piece : layout_.pieces()) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(device_->Piece(piece, page));
      for (int64_t i = 0; i < piece.bytes; ++i) {
        if (bytes[i] != (unsigned char)(k)) return false;
      }
      ++k;
    }
    return true;
  }
};

TEST_P(CopyWorkerTest, PagesComeBackAsTheyWentThroughTheHost) {
  CopyWorker worker(*device_, *host_, Backend());
  CopyPlan out{1, CopyDirection::kDeviceToHost, {}}, in{2, CopyDirection::kHostToDevice, {}};
  for (int i = 0; i < 4; ++i) {
    Fill(PageId(1 + i), 10 * i);
    out.pages.push_back({PageId(1 + i), HostPageId(3 + i)});
    in.pages.push_back({PageId(8 - i), HostPageId(3 + i)});
  }
  worker.Start({}, {&out, 1});
  for (const LogicalLayer layer : layout_.layers()) EXPECT_TRUE(worker.Loaded(layer));  // nothing is loaded
  worker.Finish();
  worker.Start({&in, 1}, {});
  for (const LogicalLayer layer : layout_.layers()) {
    worker.WaitLoaded(layer);
    EXPECT_TRUE(worker.Loaded(layer));
  }
  worker.Finish();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Holds(PageId(8 - i), 10 * i));
  EXPECT_EQ(worker.bytes_loaded(), 4 * layout_.page_bytes());
  EXPECT_EQ(worker.bytes_backed_up(), 4 * layout_.page_bytes());
}

TEST_P(CopyWorkerTest, LayersBecomeReadableInOrderOverManySteps) {
  CopyWorker worker(*device_, *host_, Backend());
  CopyPlan in{1, CopyDirection::kHostToDevice, {}};
  for (int i = 0; i < 8; ++i) in.pages.push_back({PageId(1 + i), HostPageId(i)});
  for (int step = 0; step < 200; ++step) {
    worker.Start({&in, 1}, {});
    const std::vector<LogicalLayer> layers = layout_.layers();
    for (size_t l = 0; l < layers.size(); ++l) {
      worker.WaitLoaded(layers[l]);
      for (size_t before = 0; before <= l; ++before) EXPECT_TRUE(worker.Loaded(layers[before]));
    }
    worker.Finish();
    worker.Start({}, {});
    worker.Finish();
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CopyWorkerTest,
                         ::testing::Values(HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                           HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst));

}  // namespace
}  // namespace sluice
