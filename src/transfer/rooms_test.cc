// The room tables one step at a time; `sluice simulate --scenario pd` runs them in worlds full of faults.
#include <gtest/gtest.h>

#include <map>

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

}  // namespace
}  // namespace sluice::transfer
