// The room tables one step at a time; `sluice simulate --scenario pd` runs them in worlds full of faults.
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "transfer/decode_rooms.h"
#include "transfer/prefill_rooms.h"

namespace sluice::transfer {
namespace {

constexpr int kLayers = 5;  // the last one has no hook, as a draft layer

KvLayout Layout() {
  ModelConfig m;
  m.num_layers = kLayers;
  m.num_heads = 1;
  m.kv_lora_rank = 64;
  m.qk_rope = 32;
  m.index.num_heads = 1;
  m.index.head_dim = 32;
  m.index.topk = 16;
  m.index.computes = {true, false, true, false, true};
  m.layer_is_moe.assign(kLayers, false);
  auto layout = KvLayout::Make(m, {});
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *layout;
}

TEST(Rooms, AbortIsAnsweredOnlyWhenNoWriteIsOutstanding) {
  PrefillRooms rooms(Layout(), {});
  ASSERT_TRUE(rooms.Add(1, 64, {}, 0).ok());
  rooms.OnFrame(PeerId(0), Reserve{1, 0, 64, {}, 0, {3}}, 0);
  const PageId source[] = {PageId(9)};
  rooms.BeginForward(1, 1, {0, 64, true, true}, source, 0);
  rooms.EndForward(1, OkStatus(), 0);
  std::vector<WriteId> writes;
  for (const Action& a : rooms.TakeActions())
    if (const auto* w = std::get_if<PostWrite>(&a)) writes.push_back(w->id);
  ASSERT_EQ(writes.size(), 1u);
  rooms.OnFrame(PeerId(0), Abort{1, 0, "client"}, 0);
  rooms.OnFrame(PeerId(0), Abort{1, 1, "client"}, 0);
  const auto acks = [&] {
    int n = 0;
    for (const Action& a : rooms.TakeActions())
      if (const auto* s = std::get_if<SendFrame>(&a)) n += std::holds_alternative<AbortAck>(s->message);
    return n;
  };
  EXPECT_EQ(acks(), 0);
  rooms.OnWriteDone(writes[0], OkStatus(), 0);
  EXPECT_EQ(acks(), 1);
  rooms.OnFrame(PeerId(0), Abort{1, 2, "client"}, 0);
  EXPECT_EQ(acks(), 1) << "an ended room answers at once";
  EXPECT_FALSE(rooms.Add(1, 64, {}, 0).ok()) << "and its id stays taken";
}

TEST(Rooms, LayersWithoutAHookAreSentAtTheEndAndTheSetEqualsTheMonolithicOne) {
  for (const bool per_layer : {true, false}) {
    RoomOptions options;
    options.per_layer = per_layer;
    options.layer_group = 2;
    PrefillRooms rooms(Layout(), options);
    ASSERT_TRUE(rooms.Add(1, 100, {}, 0).ok());
    rooms.OnFrame(PeerId(0), Reserve{1, 0, 100, {}, 0, {3, 4}}, 0);
    const PageId source[] = {PageId(9), PageId(8)};
    rooms.BeginForward(1, 1, {0, 100, true, true}, source, 0);
    for (int l = 0; l < kLayers - 1; ++l) rooms.OnLayerFinal(1, LogicalLayer(l), 0);
    rooms.EndForward(1, OkStatus(), 0);
    std::map<int, int> sent;
    int writes = 0;
    for (const Action& a : rooms.TakeActions())
      if (const auto* w = std::get_if<PostWrite>(&a)) {
        ++writes;
        for (const LogicalLayer l : w->layers) sent[l.value] += int(w->pages.size());
      }
    EXPECT_EQ(writes, 3);
    for (int l = 0; l < kLayers; ++l) EXPECT_EQ(sent[l], 2) << "layer " << l;
    EXPECT_EQ(rooms.stats().layers_sent_at_end, per_layer ? 1 : 0);
  }
}

TEST(Rooms, APromptThatDecodeHoldsEntirelyMovesNoByteAndCompletes) {
  PrefillRooms rooms(Layout(), {});
  ASSERT_TRUE(rooms.Add(1, 128, {}, 0).ok());
  rooms.OnFrame(PeerId(0), Reserve{1, 0, 128, {}, 2, {}}, 0);
  const PageId source[] = {PageId(9), PageId(8)};
  rooms.BeginForward(1, 1, {64, 128, true, true}, source, 0);
  rooms.EndForward(1, OkStatus(), 0);
  rooms.SetAux(1, {}, 0);
  int complete = 0;
  for (const Action& a : rooms.TakeActions()) {
    EXPECT_FALSE(std::holds_alternative<PostWrite>(a));
    if (const auto* s = std::get_if<SendFrame>(&a)) complete += std::holds_alternative<Complete>(s->message);
  }
  EXPECT_EQ(complete, 1);
  EXPECT_EQ(rooms.stats().bytes_sent, 0);
}

TEST(Rooms, WrongCountsFailTheRoomWithBothValues) {
  DecodeRooms rooms(Layout(), {});
  const PageId pages[] = {PageId(5)};
  ASSERT_TRUE(rooms.Open(1, PeerId(0), 0, 64, {}, 0, pages, 0).ok());
  (void)rooms.TakeActions();
  Complete c{1, 0, {{uint8_t(KvComponent::kLatent), 0, 2}}, {}, {}};
  rooms.OnFrame(PeerId(0), c, 0);
  bool named = false;
  for (const Action& a : rooms.TakeActions())
    if (const auto* f = std::get_if<RoomFailed>(&a))
      named = Message(f->status).find("2 pages arrived, 1 expected") != std::string_view::npos;
  EXPECT_TRUE(named);
  EXPECT_EQ(rooms.active(), 0u);
}

// One room of three pages whose connection (peer 1) breaks when layers 0 and 1 are under way; decode, of
// epoch 5, comes back as peer 2.
class BrokenConnection : public ::testing::Test {
 protected:
  void SetUp() override {
    RoomOptions o;
    o.layer_group = 2;
    o.epoch = 9;
    rooms = std::make_unique<PrefillRooms>(Layout(), o);
    o.epoch = 5;
    decode = std::make_unique<DecodeRooms>(Layout(), o);
    ASSERT_TRUE(rooms->Add(1, 192, {}, 0).ok());
    ASSERT_TRUE(decode->Open(1, PeerId(1), 9, 192, {}, 0, kPages, 0).ok());
    reserve = std::get<Reserve>(std::get<SendFrame>(decode->TakeActions().at(0)).message);
    rooms->OnFrame(PeerId(1), reserve, 0);
    rooms->BeginForward(1, 1, {0, 192, true, true}, kSource, 0);
    rooms->OnLayerFinal(1, LogicalLayer(0), 0);
    rooms->OnLayerFinal(1, LogicalLayer(1), 0);
    first = Writes().at(0).id;
  }
  std::vector<PostWrite> Writes() {
    std::vector<PostWrite> writes;
    actions = rooms->TakeActions();
    for (const Action& a : actions)
      if (const auto* w = std::get_if<PostWrite>(&a)) writes.push_back(*w);
    return writes;
  }
  template <typename T>
  static std::vector<T> Frames(const std::vector<Action>& of) {
    std::vector<T> frames;
    for (const Action& a : of)
      if (const auto* s = std::get_if<SendFrame>(&a))
        if (const auto* f = std::get_if<T>(&s->message)) frames.push_back(*f);
    return frames;
  }
  void Break(int32_t arrived) {
    rooms->OnPeerCut(PeerId(1), Unavailable("reset"), 0);
    rooms->OnWriteDone(first, Unavailable("reset"), 0, arrived);
    decode->OnPeerCut(PeerId(1), Unavailable("reset"), 0);
  }
  void EndForward() {
    for (int l = 2; l < kLayers - 1; ++l) rooms->OnLayerFinal(1, LogicalLayer(l), 0);
    rooms->EndForward(1, OkStatus(), 0);
    rooms->SetAux(1, {}, 0);
  }
  void Resume() {
    decode->Resume(1, PeerId(2), 9, 0);
    rooms->OnFrame(PeerId(2), Frames<Reserve>(decode->TakeActions()).at(0), 0);
  }
  static constexpr PageId kPages[] = {PageId(5), PageId(6), PageId(7)};
  static constexpr PageId kSource[] = {PageId(11), PageId(12), PageId(13)};
  std::unique_ptr<PrefillRooms> rooms;
  std::unique_ptr<DecodeRooms> decode;
  Reserve reserve;
  WriteId first = 0;
  std::vector<Action> actions;
};

TEST_F(BrokenConnection, WhatHasArrivedStaysAndTheRestGoesOutInOrderOnTheNext) {
  Break(1);
  EndForward();
  EXPECT_TRUE(Writes().empty()) << "there is nobody to write to";
  EXPECT_TRUE(Frames<Complete>(actions).empty());
  Resume();
  const std::vector<PostWrite> writes = Writes();
  ASSERT_EQ(writes.size(), 3u);
  EXPECT_EQ(writes[0].layers, std::vector{LogicalLayer(1)}) << "layer 0 has arrived";
  EXPECT_EQ(writes[1].layers, (std::vector{LogicalLayer(2), LogicalLayer(3)}));
  EXPECT_EQ(writes[2].layers, std::vector{LogicalLayer(4)});
  for (const PostWrite& w : writes) {
    EXPECT_EQ(w.peer, PeerId(2));
    rooms->OnWriteDone(w.id, OkStatus(), 0);
  }
  actions = rooms->TakeActions();
  const std::vector<Complete> complete = Frames<Complete>(actions);
  ASSERT_EQ(complete.size(), 1u);
  decode->OnFrame(PeerId(2), complete[0], 0);
  const std::vector<Action> end = decode->TakeActions();
  ASSERT_EQ(end.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<RoomReady>(end[0])) << "counts and bytes are those of one transfer";
  EXPECT_EQ(rooms->stats().resumes, 1);
  EXPECT_EQ(decode->stats().resumes, 1);
  EXPECT_EQ(decode->stats().leased_pages, 0);
}

TEST_F(BrokenConnection, ThatPrefillNoticesAfterDecodeIsBackFailsWritesOntoTheNext) {
  decode->OnPeerCut(PeerId(1), Unavailable("reset"), 0);
  EXPECT_EQ(rooms->PeerOf(1), PeerId(1));
  rooms->OnPeerCut(PeerId(1), Unavailable("it came back"), 0);
  Resume();
  EXPECT_TRUE(Writes().empty());
  rooms->OnWriteDone(first, Unavailable("reset"), 0, 0);  // of the old connection
  const std::vector<PostWrite> writes = Writes();
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_EQ(writes[0].peer, PeerId(2));
  EXPECT_EQ(writes[0].layers, (std::vector{LogicalLayer(0), LogicalLayer(1)}));
}

TEST_F(BrokenConnection, AReservationThatIsNotTheFirstOneEndsTheRoom) {
  Break(0);
  reserve.pages[1] = 99;
  rooms->OnFrame(PeerId(2), reserve, 0);
  EXPECT_TRUE(Writes().empty());
  EXPECT_EQ(Frames<Failed>(actions).size(), 1u);
  rooms->EndForward(1, OkStatus(), 0);
  EXPECT_EQ(rooms->active(), 0u);
}

TEST_F(BrokenConnection, AnotherDecodeInstanceDoesNotGetTheRoom) {
  Break(0);
  reserve.sender_epoch = 6;
  rooms->OnFrame(PeerId(2), reserve, 0);
  EXPECT_TRUE(Writes().empty());
  EXPECT_EQ(Frames<Failed>(actions).size(), 1u);
  rooms->OnFrame(PeerId(2), Abort{1, 0, "mine", 6}, 0);
  EXPECT_EQ(Frames<AbortAck>(rooms->TakeActions()).size(), 1u);
  EXPECT_EQ(rooms->active(), 1u) << "it waits for its own";
}

TEST_F(BrokenConnection, AnotherProcessAtTheAddressEndsTheRoom) {
  Break(0);
  decode->Resume(1, PeerId(2), 10, 0);
  EXPECT_EQ(decode->active(), 0u);
  EXPECT_TRUE(Frames<Reserve>(decode->TakeActions()).empty());
}

TEST_F(BrokenConnection, NobodyComingBackEndsBothSidesWithTheirPagesFree) {
  Break(0);
  (void)rooms->TakeActions();
  (void)decode->TakeActions();
  rooms->Tick(6'000'000'000);
  decode->Tick(6'000'000'000);
  rooms->EndForward(1, OkStatus(), 0);
  EXPECT_EQ(rooms->active(), 0u);
  EXPECT_EQ(decode->active(), 0u);
  EXPECT_EQ(decode->stats().leased_pages, 0);
}

TEST_F(BrokenConnection, AClientThatLeavesMeanwhileEndsTheRoomAtOnce) {
  Break(0);
  decode->Cancel(1, Aborted("client"), 0);
  EXPECT_EQ(decode->active(), 0u) << "nothing can come by a connection that is closed";
  EXPECT_TRUE(Frames<Abort>(decode->TakeActions()).empty());
}

TEST_F(BrokenConnection, AnAbortOnTheNextConnectionIsAnsweredWhenNothingIsUnderWay) {
  rooms->OnPeerCut(PeerId(1), Unavailable("reset"), 0);
  rooms->OnFrame(PeerId(2), Abort{1, 0, "client", 5}, 0);
  EXPECT_TRUE(Frames<AbortAck>(rooms->TakeActions()).empty());
  rooms->OnWriteDone(first, Unavailable("reset"), 0, 0);
  rooms->EndForward(1, OkStatus(), 0);
  EXPECT_EQ(Frames<AbortAck>(rooms->TakeActions()).size(), 1u);
  rooms->OnFrame(PeerId(2), reserve, 0);  // late
  EXPECT_TRUE(Writes().empty());
}

TEST_F(BrokenConnection, ThatSwallowsTheLastWordHasItSaidAgain) {
  EndForward();
  rooms->OnWriteDone(first, OkStatus(), 0);
  for (const PostWrite& w : Writes()) rooms->OnWriteDone(w.id, OkStatus(), 0);
  EXPECT_EQ(Frames<Complete>(rooms->TakeActions()).size(), 1u);  // lost
  decode->OnPeerCut(PeerId(1), Unavailable("reset"), 0);
  Resume();
  const std::vector<Complete> again = Frames<Complete>(rooms->TakeActions());
  ASSERT_EQ(again.size(), 1u);
  decode->OnFrame(PeerId(2), again[0], 0);
  EXPECT_EQ(decode->stats().rooms_completed, 1);
}

TEST_F(BrokenConnection, OverAndOverWithoutAByteEndsTheRoom) {
  for (int32_t peer = 1; peer <= 3; ++peer) {
    decode->OnPeerCut(PeerId(peer), Unavailable("reset"), 0);
    decode->Resume(1, PeerId(peer + 1), 9, 0);
    ASSERT_EQ(decode->active(), 1u);
  }
  decode->OnBytes(PeerId(4), 1, 10, 0);
  decode->OnPeerCut(PeerId(4), Unavailable("reset"), 0);
  decode->Resume(1, PeerId(5), 9, 0);
  EXPECT_EQ(decode->active(), 1u) << "it got further";
  for (int32_t peer = 5; peer <= 8; ++peer) {
    decode->OnPeerCut(PeerId(peer), Unavailable("reset"), 0);
    decode->Resume(1, PeerId(peer + 1), 9, 0);
  }
  EXPECT_EQ(decode->active(), 0u);
}

}  // namespace
}  // namespace sluice::transfer
