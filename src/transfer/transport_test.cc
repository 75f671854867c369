#include "transfer/transport.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace sluice::transfer {
namespace {

KvLayout Layout() {
  ModelConfig m;
  m.num_layers = 4;
  m.num_heads = 1;
  m.kv_lora_rank = 64;
  m.qk_rope = 32;
  m.index.num_heads = 1;
  m.index.head_dim = 32;
  m.index.topk = 16;
  m.index.computes = {true, false, true, false};
  m.layer_is_moe.assign(4, false);
  return *KvLayout::Make(m, {});
}

void Fill(const DevicePool& pool, PageId page, uint8_t value) {
  for (const KvPiece& piece : pool.layout().pieces())
    std::memset(pool.Piece(piece, page), value + piece.layer.value * 10 + int(piece.component),
                size_t(piece.bytes));
}
bool Holds(const DevicePool& pool, PageId page, uint8_t value) {
  for (const KvPiece& piece : pool.layout().pieces())
    for (int64_t i = 0; i < piece.bytes; ++i)
      if (pool.Piece(piece, page)[i] != std::byte(value + piece.layer.value * 10 + int(piece.component)))
        return false;
  return true;
}
Hello HelloOf(const DevicePool& pool) {
  Hello h;
  h.instance_id = "peer";
  h.lanes = uint32_t(pool.lanes());
  h.pages_per_lane = uint64_t(pool.pages_per_lane());
  h.regions.assign(size_t(pool.lanes()), pool.ShareHandle());
  return h;
}
Status WaitFor(Transport& t, WriteId id) {
  std::vector<WriteDone> done;
  for (int i = 0; i < 5000; ++i) {
    t.Poll(&done);
    for (const WriteDone& d : done)
      if (d.id == id) return d.status;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return DeadlineExceeded("write {} never ended", id);
}
const std::vector<LogicalLayer> kAll = {LogicalLayer(0), LogicalLayer(1), LogicalLayer(2), LogicalLayer(3)};

TEST(ShmTransport, MovesEveryPieceBetweenPoolsOfOtherLaneCounts) {
  auto source = *DevicePool::MakeShared(Layout(), 2, 8);
  auto target = *DevicePool::MakeShared(Layout(), 3, 5);
  auto t = MakeShmTransport(*source, {});
  ASSERT_TRUE(t->AddPeer(PeerId(1), HelloOf(*target)).ok());
  Fill(*source, PageId(5), 1);
  Fill(*source, PageId(8), 2);
  t->Post({1, 7, PeerId(1), kAll, {{0, PageId(5), PageId(4)}, {1, PageId(8), PageId(13)}}});
  ASSERT_TRUE(WaitFor(*t, 1).ok());
  EXPECT_TRUE(Holds(*target, PageId(4), 1));
  EXPECT_TRUE(Holds(*target, PageId(13), 2));
}

TEST(ShmTransport, WritesIntoAnotherProcess) {
  auto target = *DevicePool::MakeShared(Layout(), 1, 8);
  const Hello hello = HelloOf(*target);
  const pid_t child = fork();
  if (child == 0) {
    auto source = *DevicePool::MakeShared(Layout(), 1, 8);
    Fill(*source, PageId(2), 9);
    auto t = MakeShmTransport(*source, {});
    const bool ok = t->AddPeer(PeerId(1), hello).ok();
    t->Post({1, 7, PeerId(1), kAll, {{0, PageId(2), PageId(3)}}});
    _exit(ok && WaitFor(*t, 1).ok() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Holds(*target, PageId(3), 9));
}

TEST(ShmTransport, AfterRemovePeerNothingOfOursIsWritten) {
  auto source = *DevicePool::MakeShared(Layout(), 1, 64);
  auto target = *DevicePool::MakeShared(Layout(), 1, 64);
  auto t = MakeShmTransport(*source, {.bytes_per_second_max = 2e6});
  ASSERT_TRUE(t->AddPeer(PeerId(1), HelloOf(*target)).ok());
  std::vector<PageMove> moves;
  for (int32_t p = 1; p < 32; ++p) {
    Fill(*source, PageId(p), 3);
    moves.push_back({p, PageId(p), PageId(p)});
  }
  for (WriteId id = 1; id <= 20; ++id) t->Post({id, 7, PeerId(1), kAll, moves});
  t->RemovePeer(PeerId(1));
  for (int32_t p = 1; p < 32; ++p) target->Poison(PageId(p));
  EXPECT_FALSE(WaitFor(*t, 20).ok());
  for (int32_t p = 1; p < 32; ++p)
    for (const KvPiece& piece : target->layout().pieces())
      ASSERT_EQ(target->Piece(piece, PageId(p))[0], std::byte(0xff))
          << "written after the connection was cut";
}

TEST(ShmTransport, RefusesAPeerWithoutSharedMemoryOrOfAnotherSize) {
  auto source = *DevicePool::MakeShared(Layout(), 1, 8);
  auto target = *DevicePool::MakeShared(Layout(), 1, 8);
  auto t = MakeShmTransport(*source, {});
  Hello none = HelloOf(*target);
  none.regions = {""};
  EXPECT_NE(Message(t->AddPeer(PeerId(1), none)).find("exposes no shared memory"), std::string_view::npos);
  Hello lies = HelloOf(*target);
  lies.pages_per_lane = 9;
  EXPECT_NE(Message(t->AddPeer(PeerId(1), lies)).find("expected from its layout"), std::string_view::npos);
}

TEST(ShmTransport, ADestinationOutsideThePoolFailsTheWriteAndNotTheProcess) {
  auto source = *DevicePool::MakeShared(Layout(), 1, 8);
  auto target = *DevicePool::MakeShared(Layout(), 1, 8);
  auto t = MakeShmTransport(*source, {});
  ASSERT_TRUE(t->AddPeer(PeerId(1), HelloOf(*target)).ok());
  t->Post({1, 7, PeerId(1), kAll, {{0, PageId(2), PageId(800)}}});
  EXPECT_FALSE(WaitFor(*t, 1).ok());
}

}  // namespace
}  // namespace sluice::transfer
