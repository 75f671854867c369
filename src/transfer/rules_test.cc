// The rules of per-layer transfer and of aborts, one test each, on the room tables themselves.
#include <gtest/gtest.h>

#include "kv/layout_fixture.h"
#include "transfer/decode_rooms.h"
#include "transfer/prefill_rooms.h"

namespace sluice::transfer {
namespace {

const PeerId kDecode(3), kOther(4);

ModelConfig Deep(int layers) {
  ModelConfig m = testing::Small();
  m.num_layers = layers;
  m.index.computes.assign(size_t(layers), true);
  return m;
}

template <typename T>
std::vector<T> Take(std::vector<Action>* actions) {
  std::vector<T> out;
  for (Action& a : *actions)
    if (auto* x = std::get_if<T>(&a)) out.push_back(*x);
  return out;
}
template <typename T>
int Frames(const std::vector<Action>& actions) {
  int n = 0;
  for (const Action& a : actions)
    if (const auto* s = std::get_if<SendFrame>(&a)) n += std::holds_alternative<T>(s->message);
  return n;
}

class Rules : public ::testing::Test {
 protected:
  void Make(int layers = 3, int group = 8) {
    RoomOptions o;
    o.layer_group = group;
    layers_ = layers;
    layout_ = testing::MakeLayout(Deep(layers));
    rooms_ = std::make_unique<PrefillRooms>(layout_, o);
  }
  // A room whose prompt's pages go to 101, 102, ...; its source pages are 1, 2, ...
  void Ready(RoomId room, int64_t tokens, int32_t first_page = 0) {
    ASSERT_TRUE(rooms_->Add(room, tokens, {}, 0).ok());
    Reserve r{room, 0, uint64_t(tokens), {}, uint32_t(first_page), {}};
    for (int32_t i = first_page; i < CeilDiv(tokens, kPageTokens); ++i) r.pages.push_back(101 + i);
    rooms_->OnFrame(kDecode, r, 0);
    (void)rooms_->TakeActions();
  }
  std::vector<PageId> Source(int64_t tokens) {
    std::vector<PageId> pages;
    for (int32_t i = 0; i < CeilDiv(tokens, kPageTokens); ++i) pages.push_back(PageId(1 + i));
    return pages;
  }
  std::vector<PostWrite> Writes() {
    auto actions = rooms_->TakeActions();
    return Take<PostWrite>(&actions);
  }
  void Layers(int64_t step, int from, int to) {
    for (int l = from; l < to; ++l) rooms_->OnLayerFinal(step, LogicalLayer(l), 0);
  }
  int layers_ = 0;
  KvLayout layout_;
  std::unique_ptr<PrefillRooms> rooms_;
};

TEST_F(Rules, CachedPrefixGoesWithTheFirstChunksHooks) {
  Make(3, 1);
  Ready(1, 256);
  rooms_->BeginForward(1, 1, {128, 200, true, false}, Source(256), 0);
  EXPECT_TRUE(Writes().empty()) << "nothing is final yet";
  Layers(1, 0, 1);
  const auto writes = Writes();
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_EQ(writes[0].pages,
            (std::vector<PageMove>{
                {0, PageId(1), PageId(101)}, {1, PageId(2), PageId(102)}, {2, PageId(3), PageId(103)}}));
}

TEST_F(Rules, HooksOfAnotherForwardDoNotReachAContext) {
  Make(3, 1);
  Ready(1, 128);
  rooms_->BeginForward(1, 1, {0, 64, true, false}, Source(128), 0);
  Layers(2, 0, 3);
  EXPECT_TRUE(Writes().empty());
  Layers(1, 0, 2);
  rooms_->EndForward(1, OkStatus(), 0);
  EXPECT_EQ(Writes().size(), 3u) << "two by hooks, the third at the end";
  Layers(1, 0, 3);
  EXPECT_TRUE(Writes().empty()) << "the forward is over";
}

TEST_F(Rules, AHookThatFiresAgainSendsNothingAgain) {
  Make(3, 1);
  Ready(1, 64);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  Layers(1, 0, 3);
  Layers(1, 0, 3);
  rooms_->EndForward(1, OkStatus(), 0);
  EXPECT_EQ(Writes().size(), 3u);
  EXPECT_EQ(rooms_->stats().repeated_hooks, 3);
}

TEST_F(Rules, AWriteThatKeepsFailingEndsTheRoomAndTellsDecode) {
  Make();
  Ready(1, 64);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  rooms_->EndForward(1, OkStatus(), 0);
  auto writes = Writes();
  for (int attempt = 0; attempt < 2; ++attempt) {
    ASSERT_EQ(writes.size(), 1u);
    rooms_->OnWriteDone(writes[0].id, Unavailable("link down"), 0);
    writes = Writes();
  }
  ASSERT_EQ(writes.size(), 1u);
  rooms_->OnWriteDone(writes[0].id, Unavailable("link down"), 0);
  auto actions = rooms_->TakeActions();
  EXPECT_EQ(Frames<Failed>(actions), 1);
  EXPECT_EQ(Take<RoomFailed>(&actions).size(), 1u);
  EXPECT_EQ(Take<RoomEnded>(&actions).size(), 1u);
  EXPECT_EQ(rooms_->active(), 0u);
}

TEST_F(Rules, MiddleChunksSendWholePagesAndTheLastOneTheRest) {
  Make();
  Ready(1, 200, 1);
  std::vector<std::vector<int32_t>> ordinals;
  int64_t step = 0;
  for (const Chunk c :
       {Chunk{0, 100, true, false}, Chunk{100, 130, false, false}, Chunk{130, 200, false, true}}) {
    rooms_->BeginForward(++step, 1, c, Source(200), 0);
    rooms_->EndForward(step, OkStatus(), 0);
    auto& list = ordinals.emplace_back();
    for (const PostWrite& w : Writes())
      for (const PageMove& m : w.pages) {
        list.push_back(m.ordinal);
        EXPECT_EQ(m.to.value, 101 + m.ordinal) << "absolute, whatever the chunk";
      }
  }
  EXPECT_EQ(ordinals, (std::vector<std::vector<int32_t>>{{}, {1}, {2, 3}}));
}

TEST_F(Rules, SeventyNineLayersAreTenSubmitsAndTheShortGroupIsFlushed) {
  Make(79, 8);
  Ready(1, 64);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  Layers(1, 0, 79);
  const auto writes = Writes();
  ASSERT_EQ(writes.size(), 10u) << "the short one does not wait for the forward's end";
  EXPECT_EQ(writes.back().layers.size(), 7u);
  rooms_->EndForward(1, OkStatus(), 0);
  EXPECT_TRUE(Writes().empty());
}

TEST_F(Rules, ASecondDestinationForARoomIsRefusedAndTheFirstGoesOn) {
  Make();
  Ready(1, 64);
  rooms_->OnFrame(kOther, Reserve{1, 0, 64, {}, 0, {55}}, 0);
  auto actions = rooms_->TakeActions();
  EXPECT_EQ(Frames<Failed>(actions), 1);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  rooms_->EndForward(1, OkStatus(), 0);
  const auto writes = Writes();
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_EQ(writes[0].peer, kDecode);
  EXPECT_EQ(writes[0].pages[0].to, PageId(101));
}

TEST_F(Rules, TwoRoomsOfOneForwardKeepTheirOwnDestinations) {
  Make();
  Ready(1, 64);
  ASSERT_TRUE(rooms_->Add(2, 64, {}, 0).ok());
  rooms_->OnFrame(kOther, Reserve{2, 0, 64, {}, 0, {77}}, 0);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  rooms_->BeginForward(1, 2, {0, 64, true, true}, Source(64), 0);
  rooms_->EndForward(1, OkStatus(), 0);
  const auto writes = Writes();
  ASSERT_EQ(writes.size(), 2u);
  EXPECT_EQ(writes[0].pages[0].to, PageId(101));
  EXPECT_EQ(writes[1].pages[0].to, PageId(77));
  EXPECT_EQ(writes[1].peer, kOther);
}

TEST_F(Rules, RegisteringAChunkTwiceIsOnce) {
  Make();
  Ready(1, 64);
  for (int i = 0; i < 9; ++i) rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  Layers(1, 0, 3);
  rooms_->EndForward(1, OkStatus(), 0);
  EXPECT_EQ(Writes().size(), 1u);
}

TEST_F(Rules, ARoomThatEndsKeepsItsPagesUntilItsWritesAndItsForwardAreOver) {
  Make(3, 1);
  Ready(1, 64);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  Layers(1, 0, 1);
  const auto writes = Writes();
  rooms_->Cancel(1, Aborted("client"), 0);
  auto actions = rooms_->TakeActions();
  EXPECT_EQ(Take<RoomFailed>(&actions).size(), 1u);
  EXPECT_TRUE(Take<RoomEnded>(&actions).empty());
  rooms_->OnWriteDone(writes[0].id, OkStatus(), 0);
  actions = rooms_->TakeActions();
  EXPECT_TRUE(Take<RoomEnded>(&actions).empty()) << "the forward may still be told of a layer";
  Layers(1, 1, 3);
  EXPECT_TRUE(Writes().empty()) << "nothing more is sent for it";
  rooms_->EndForward(1, OkStatus(), 0);
  actions = rooms_->TakeActions();
  EXPECT_EQ(Take<RoomEnded>(&actions).size(), 1u);
}

// Aborts.

TEST_F(Rules, AnAbortWithoutWritesIsAnsweredAtOnceAndFailsBeforeItIsAnswered) {
  Make();
  Ready(1, 64);
  rooms_->OnFrame(kDecode, Abort{1, 0, "client"}, 0);
  const auto actions = rooms_->TakeActions();
  int failed_at = -1, ack_at = -1, at = 0;
  for (const Action& a : actions) {
    if (std::holds_alternative<RoomFailed>(a)) failed_at = at;
    if (const auto* s = std::get_if<SendFrame>(&a); s && std::holds_alternative<AbortAck>(s->message))
      ack_at = at;
    ++at;
  }
  EXPECT_GE(failed_at, 0);
  EXPECT_GT(ack_at, failed_at);
}

TEST_F(Rules, AWriteCountsAsOutstandingFromTheMomentItIsPosted) {
  Make(3, 1);
  Ready(1, 64);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  Layers(1, 0, 1);  // posted; the transport has not seen it
  rooms_->OnFrame(kDecode, Abort{1, 0, "client"}, 0);
  rooms_->EndForward(1, OkStatus(), 0);
  auto actions = rooms_->TakeActions();
  EXPECT_EQ(Frames<AbortAck>(actions), 0);
  rooms_->OnWriteDone(Take<PostWrite>(&actions)[0].id, OkStatus(), 0);
  EXPECT_EQ(Frames<AbortAck>(rooms_->TakeActions()), 1);
}

TEST_F(Rules, AnAbortAfterTheEndIsAnsweredAndChangesNothing) {
  Make();
  Ready(1, 64);
  rooms_->BeginForward(1, 1, {0, 64, true, true}, Source(64), 0);
  rooms_->EndForward(1, OkStatus(), 0);
  for (const PostWrite& w : Writes()) rooms_->OnWriteDone(w.id, OkStatus(), 0);
  rooms_->SetAux(1, {}, 0);
  (void)rooms_->TakeActions();
  ASSERT_EQ(rooms_->stats().rooms_completed, 1);
  rooms_->OnFrame(kDecode, Abort{1, 0, "late"}, 0);
  auto actions = rooms_->TakeActions();
  EXPECT_EQ(Frames<AbortAck>(actions), 1);
  EXPECT_EQ(actions.size(), 1u);
}

TEST_F(Rules, OnlyTheDecodeThatHoldsARoomMayAbortIt) {
  Make();
  Ready(1, 64);
  rooms_->OnFrame(kOther, Abort{1, 0, "not mine"}, 0);
  EXPECT_EQ(rooms_->active(), 1u);
}

TEST_F(Rules, AbortAndAckWhereAnotherFrameIsExpectedDisturbNothing) {
  Make();
  rooms_->OnFrame(kDecode, AbortAck{9}, 0);
  rooms_->OnFrame(kDecode, Complete{9, 0, {}, {}, {}}, 0);
  DecodeRooms decode(layout_, {});
  decode.OnFrame(kDecode, Abort{9, 0, "x"}, 0);
  decode.OnFrame(kDecode, AbortAck{9}, 0);
  EXPECT_TRUE(decode.TakeActions().empty());
  EXPECT_EQ(decode.stats().late_frames, 2);
  EXPECT_TRUE(rooms_->TakeActions().empty());
}

TEST(DecodeRules, PagesStayLeasedUntilTheAckOrTheFence) {
  const KvLayout layout = testing::MakeLayout(testing::Small());
  RoomOptions o;
  o.waiting_timeout = 100;
  o.abort_repeat = 10;
  o.abort_fence = 50;
  const PageId pages[] = {PageId(5)};
  for (const bool ack : {true, false}) {
    DecodeRooms rooms(layout, o);
    ASSERT_TRUE(rooms.Open(1, kDecode, 0, 64, {}, 0, pages, 0).ok());
    rooms.Tick(100);
    auto actions = rooms.TakeActions();
    EXPECT_EQ(Take<RoomFailed>(&actions).size(), 1u) << "the client learns of it at the deadline";
    EXPECT_TRUE(Take<RoomEnded>(&actions).empty());
    EXPECT_EQ(rooms.stats().leased_pages, 1);
    EXPECT_EQ(Frames<Abort>(actions), 1);
    rooms.Tick(110);
    rooms.Tick(120);
    actions = rooms.TakeActions();
    EXPECT_EQ(Frames<Abort>(actions), 2) << "repeated while unanswered";
    EXPECT_TRUE(Take<RoomFailed>(&actions).empty()) << "and reported once";
    if (ack) {
      rooms.OnFrame(kDecode, AbortAck{1}, 121);
    } else {
      rooms.Tick(150);
      actions = rooms.TakeActions();
      ASSERT_EQ(Take<FencePeer>(&actions).size(), 1u);
      EXPECT_EQ(rooms.stats().leased_pages, 1);
      rooms.OnFenced(kDecode, 151);
    }
    actions = rooms.TakeActions();
    EXPECT_EQ(Take<RoomEnded>(&actions).size(), 1u);
    EXPECT_EQ(rooms.stats().leased_pages, 0);
  }
}

TEST(DecodeRules, QueueTimeOnAHealthyPeerIsNotItsDeath) {
  const KvLayout layout = testing::MakeLayout(testing::Small());
  RoomOptions o;
  o.waiting_timeout = o.bootstrap_timeout = 100;
  DecodeRooms decode(layout, o);
  const PageId pages[] = {PageId(5)};
  ASSERT_TRUE(decode.Open(1, kDecode, 0, 64, {}, 0, pages, 0).ok());
  PrefillRooms prefill(layout, o);
  ASSERT_TRUE(prefill.Add(1, 64, {}, 0).ok());
  for (Nanos t = 60; t < 1000; t += 60) {
    decode.OnFrame(kDecode, Heartbeat{0, 0, {1}}, t);
    decode.Tick(t);
    prefill.OnFrame(kDecode, Heartbeat{0, 0, {1}}, t);
    prefill.Tick(t);
  }
  EXPECT_EQ(decode.active(), 1u);
  EXPECT_EQ(prefill.active(), 1u);
  decode.Tick(2000);
  prefill.Tick(2000);
  EXPECT_EQ(prefill.active(), 0u);
  EXPECT_EQ(decode.stats().rooms_failed, 1);
}

}  // namespace
}  // namespace sluice::transfer
