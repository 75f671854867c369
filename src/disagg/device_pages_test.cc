// Pages of a device on both sides: nothing leaves before the device has passed its event, and what the device
// refuses ends a room, not the process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "disagg/device_pages_fixture.h"
#include "tensor/fake_device.h"

namespace sluice::disagg {
namespace {

using Kind = RoomEvent::Kind;
using testing::DevicePair;
using ::testing::HasSubstr;

KvLayout Layout() { return sluice::testing::MakeLayout(sluice::testing::Small()); }
std::vector<PageId> Pages(int32_t first, int32_t n) {
  std::vector<PageId> pages;
  for (int32_t i = 0; i < n; ++i) pages.push_back(PageId(first + (i * 7) % n));
  return pages;
}

TEST(DevicePages, NoByteOfALayerLeavesBeforeItsEventCachedPagesIncluded) {
  sluice::testing::FakeDevice device;
  DevicePair pair(device, Layout(), /*layer_group=*/1, 40);
  // Pages [0, 4) of the prompt were cached, the forward computes the rest.
  const std::vector<PageId> source = Pages(2, 10), pages = Pages(20, 10);
  pair.Open(1, 640, pages);
  ASSERT_TRUE(pair.Wait(true, Kind::kReady, 1));
  pair.prefill->BeginForward(1, 1, {256, 640, true, true}, source);
  std::vector<std::shared_ptr<sluice::testing::FakeEvent>> events;
  for (int l = 0; l < 3; ++l) {
    ASSERT_TRUE(pair.prefill->EndsGroup(LogicalLayer(l)));
    events.push_back(std::make_shared<sluice::testing::FakeEvent>());
    pair.prefill->LayerQueued(1, LogicalLayer(l), events.back());
  }
  int64_t sent = 0;
  for (int l = 0; l < 3; ++l) {
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    EXPECT_EQ(pair.prefill->Stats().bytes_sent, sent);
    for (int later = l; later < 3; ++later) EXPECT_EQ(pair.Arrived(LogicalLayer(later), pages), 0) << later;
    pair.WriteLayer(LogicalLayer(l), source);  // the device is that far now
    events[size_t(l)]->Pass();
    sent += 10 * pair.LayerBytes(LogicalLayer(l));
    ASSERT_TRUE(pair.Sent(sent)) << l;
  }
  pair.prefill->ForwardDone(1, OkStatus());
  pair.prefill->SetAux(1, {});
  ASSERT_TRUE(pair.Wait(false, Kind::kReady, 1));
  pair.ExpectHolds(source, pages);
  EXPECT_EQ(pair.decode->Stats().digests_checked, 10);
  EXPECT_EQ(pair.prefill->Stats().bytes_before_forward_end, sent);
}

TEST(DevicePages, AGroupWaitsForItsLastLayerAndRoomsShareTheEvent) {
  sluice::testing::FakeDevice device;
  DevicePair pair(device, Layout(), /*layer_group=*/2, 40);
  const std::vector<PageId> first = Pages(2, 4), second = Pages(8, 4), to_first = Pages(20, 4),
                            to_second = Pages(30, 4);
  pair.Open(1, 256, to_first);
  pair.Open(2, 256, to_second);
  ASSERT_TRUE(pair.Wait(true, Kind::kReady, 1));
  ASSERT_TRUE(pair.Wait(true, Kind::kReady, 2));
  pair.prefill->BeginForward(1, 1, {0, 256, true, true}, first);
  pair.prefill->BeginForward(1, 2, {0, 256, true, true}, second);
  EXPECT_FALSE(pair.prefill->EndsGroup(LogicalLayer(0)));
  EXPECT_TRUE(pair.prefill->EndsGroup(LogicalLayer(1)));
  const auto event = std::make_shared<sluice::testing::FakeEvent>();
  pair.prefill->LayerQueued(1, LogicalLayer(0), nullptr);
  pair.prefill->LayerQueued(1, LogicalLayer(1), event);
  std::this_thread::sleep_for(std::chrono::milliseconds(40));
  EXPECT_EQ(pair.prefill->Stats().bytes_sent, 0);
  for (int l = 0; l < 3; ++l) {
    pair.WriteLayer(LogicalLayer(l), first);
    pair.WriteLayer(LogicalLayer(l), second);
  }
  event->Pass();
  ASSERT_TRUE(pair.Sent(8 * (pair.LayerBytes(LogicalLayer(0)) + pair.LayerBytes(LogicalLayer(1)))));
  EXPECT_EQ(event->waits(), 1) << "one event and one wait for all rooms";
  pair.prefill->LayerQueued(1, LogicalLayer(2), nullptr);  // its event never comes: it goes at the end
  pair.prefill->ForwardDone(1, OkStatus());
  for (const RoomId room : {1, 2}) {
    pair.prefill->SetAux(room, {});
    ASSERT_TRUE(pair.Wait(false, Kind::kReady, room));
  }
  pair.ExpectHolds(first, to_first);
  pair.ExpectHolds(second, to_second);
}

TEST(DevicePages, AnErrorOfTheDeviceEndsTheRoomWithItsTextAndOthersGoOn) {
  sluice::testing::FakeDevice device;
  DevicePair pair(device, Layout(), /*layer_group=*/3, 40);
  const auto run = [&](RoomId room, const std::vector<PageId>& source, const std::vector<PageId>& pages,
                       Status at_event) {
    pair.Open(room, 256, pages);
    ASSERT_TRUE(pair.Wait(true, Kind::kReady, room));
    const auto event = std::make_shared<sluice::testing::FakeEvent>();
    pair.prefill->BeginForward(int64_t(room), room, {0, 256, true, true}, source);
    for (int l = 0; l < 3; ++l) {
      pair.WriteLayer(LogicalLayer(l), source);
      pair.prefill->LayerQueued(int64_t(room), LogicalLayer(l), l == 2 ? event : nullptr);
    }
    event->Pass(std::move(at_event));
    pair.prefill->ForwardDone(int64_t(room), OkStatus());
    pair.prefill->SetAux(room, {});
  };
  const std::vector<PageId> source = Pages(2, 4), pages = Pages(20, 4);
  run(1, source, pages, Internal("unspecified launch failure"));
  std::optional<RoomEvent> failed = pair.Wait(true, Kind::kFailed, 1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(std::string(Message(failed->status)), HasSubstr("unspecified launch failure"));
  failed = pair.Wait(false, Kind::kFailed, 1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(std::string(Message(failed->status)), HasSubstr("unspecified launch failure"));
  ASSERT_TRUE(pair.Wait(true, Kind::kEnded, 1));
  ASSERT_TRUE(pair.Wait(false, Kind::kEnded, 1));
  // On the sending side's copy, then on the receiving side's.
  for (const RoomId room : {2, 3}) {
    device.FailCopy(room == 2 ? 0 : 1, Internal("an illegal memory access was encountered"));
    run(room, source, pages, OkStatus());
    failed = pair.Wait(false, Kind::kFailed, room);
    ASSERT_TRUE(failed) << room;
    EXPECT_THAT(std::string(Message(failed->status)), HasSubstr("illegal memory access"));
    ASSERT_TRUE(pair.Wait(true, Kind::kEnded, room));
    ASSERT_TRUE(pair.Wait(false, Kind::kEnded, room));
  }
  run(4, source, pages, OkStatus());
  ASSERT_TRUE(pair.Wait(false, Kind::kReady, 4));
  pair.ExpectHolds(source, pages);
}

TEST(DevicePages, AnAbortWhileTheDeviceIsBehindEndsOnceItIsThere) {
  sluice::testing::FakeDevice device;
  DevicePair pair(device, Layout(), /*layer_group=*/1, 40);
  const std::vector<PageId> source = Pages(2, 4), pages = Pages(20, 4);
  pair.Open(1, 256, pages);
  ASSERT_TRUE(pair.Wait(true, Kind::kReady, 1));
  const auto event = std::make_shared<sluice::testing::FakeEvent>();
  pair.prefill->BeginForward(1, 1, {0, 256, true, true}, source);
  pair.prefill->LayerQueued(1, LogicalLayer(0), event);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  pair.decode->Cancel(1, Aborted("the client is gone"));
  ASSERT_TRUE(pair.Wait(true, Kind::kFailed, 1));
  event->Pass();
  pair.prefill->ForwardDone(1, OkStatus());
  ASSERT_TRUE(pair.Wait(true, Kind::kEnded, 1));
  ASSERT_TRUE(pair.Wait(false, Kind::kEnded, 1));
  EXPECT_EQ(device.copies(), 0);
  EXPECT_EQ(pair.prefill->Stats().outstanding_writes, 0);
}

}  // namespace
}  // namespace sluice::disagg
