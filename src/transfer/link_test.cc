// Both room tables over real pools, joined by frames that are encoded and decoded and by a transport that
// moves what the test lets it move: what arrives where, and what happens when something goes wrong on the
// way.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>

#include "base/random.h"
#include "kv/layout_fixture.h"
#include "transfer/decode_rooms.h"
#include "transfer/memory_transport.h"
#include "transfer/prefill_rooms.h"

namespace sluice::transfer {
namespace {

ModelConfig Deep(int layers) {
  ModelConfig m = sluice::testing::Small();
  m.num_layers = layers;
  m.index.computes.assign(size_t(layers), true);
  for (int i = 1; i < layers; i += 2) m.index.computes[size_t(i)] = false;
  return m;
}

// One prefill instance and some decode instances. Peer i of prefill is decode instance i; of each decode
// instance, prefill is peer 0.
class Link {
 public:
  Link(KvLayout layout, const RoomOptions& options, std::vector<int32_t> lanes = {1, 1},
       int64_t pages_per_lane = 64)
      : layout_(std::move(layout)),
        source(*DevicePool::Make(layout_, lanes[0], pages_per_lane)),
        wire(*source) {
    RoomOptions o = options;
    o.lanes = lanes[0];
    prefill = std::make_unique<PrefillRooms>(layout_, o);
    for (size_t i = 1; i < lanes.size(); ++i) {
      targets.push_back(*DevicePool::Make(layout_, lanes[i], pages_per_lane));
      decodes.push_back(std::make_unique<DecodeRooms>(layout_, options));
      wire.Reach(PeerId(int32_t(i - 1)), *targets.back());
    }
  }
  // Adds the room on both sides. destination: pages of decode instance `to`.
  void Open(RoomId room, int64_t tokens, int32_t first_page, const std::vector<PageId>& destination,
            int to = 0) {
    ASSERT_TRUE(prefill->Add(room, tokens, {}, now).ok());
    ASSERT_TRUE(decodes[size_t(to)]->Open(room, PeerId(0), 0, tokens, {}, first_page, destination, now).ok());
    Carry();
  }
  // Frames and actions until nothing is left to do; writes stay where they are.
  void Carry() {
    for (bool more = true; more;) {
      more = false;
      for (Action& a : prefill->TakeActions()) {
        more = true;
        if (auto* f = std::get_if<SendFrame>(&a)) {
          decodes[size_t(f->peer.value)]->OnFrame(PeerId(0), *Decode(Encode(f->message)), now);
          ++frames[TypeName(f->message)];
        }
        if (auto* w = std::get_if<PostWrite>(&a)) {
          posted.push_back(*w);
          wire.Post(*w);
        }
        if (auto* f = std::get_if<RoomFailed>(&a)) wire.DropRoom(f->room);
        if (auto* f = std::get_if<FencePeer>(&a)) {
          ++fences;
          prefill->OnPeerLost(f->peer, Unavailable("fenced"), now);
          wire.RemovePeer(f->peer);
        }
        if (auto* r = std::get_if<ChunkRegistered>(&a)) registered.push_back(*r);
        if (auto* e = std::get_if<RoomEnded>(&a)) prefill_end[e->room] = e->status;
      }
      for (size_t d = 0; d < decodes.size(); ++d)
        for (Action& a : decodes[d]->TakeActions()) {
          more = true;
          if (auto* f = std::get_if<SendFrame>(&a)) {
            ++frames[TypeName(f->message)];
            prefill->OnFrame(PeerId(int32_t(d)), *Decode(Encode(f->message)), now);
          }
          if (auto* r = std::get_if<RoomReady>(&a)) ready[r->room] = r->aux;
          if (auto* f = std::get_if<RoomFailed>(&a)) failed[f->room] = f->status;
          if (auto* e = std::get_if<RoomEnded>(&a)) decode_end[e->room] = e->status;
        }
      std::vector<WriteDone> done;
      wire.Poll(&done);
      for (const WriteDone& w : done) {
        more = true;
        prefill->OnWriteDone(w.id, w.status, now, w.layers);
      }
    }
  }
  void Finish() {
    Carry();
    while (wire.Step()) Carry();
  }
  void Forward(int64_t step, RoomId room, const Chunk& chunk, const std::vector<PageId>& pages,
               int hooks = -1) {
    prefill->BeginForward(step, room, chunk, pages, now);
    const auto layers = layout_.latent_layers();
    for (size_t i = 0; i < layers.size() && (hooks < 0 || int(i) < hooks); ++i) {
      Fill(pages, layers[i], room);
      prefill->OnLayerFinal(step, layers[i], now);
      Carry();
    }
    for (const LogicalLayer layer : layers) Fill(pages, layer, room);
    prefill->EndForward(step, OkStatus(), now);
    Carry();
  }
  // Final rows of a layer, each byte its own.
  void Fill(const std::vector<PageId>& pages, LogicalLayer layer, RoomId room) {
    for (size_t i = 0; i < pages.size(); ++i)
      for (const KvPiece& piece : layout_.pieces())
        if (piece.layer == layer)
          for (int64_t b = 0; b < piece.bytes; ++b)
            source->Piece(piece, pages[i])[b] = Byte(room, int32_t(i), piece, b);
  }
  static std::byte Byte(RoomId room, int32_t ordinal, const KvPiece& piece, int64_t at) {
    return std::byte(room * 61 + uint64_t(ordinal) * 17 + uint64_t(piece.layer.value) * 5 +
                     uint64_t(piece.component) * 3 + uint64_t(at));
  }
  void ExpectArrived(RoomId room, int32_t first_page, const std::vector<PageId>& pages, int to = 0) {
    for (size_t i = 0; i < pages.size(); ++i)
      for (const KvPiece& piece : layout_.pieces())
        for (int64_t b = 0; b < piece.bytes; ++b)
          ASSERT_EQ(targets[size_t(to)]->Piece(piece, pages[i])[b],
                    Byte(room, first_page + int32_t(i), piece, b))
              << "room " << room << " page " << i << " layer " << piece.layer.value << " byte " << b;
  }
  void ExpectNothingLeft() {
    EXPECT_EQ(prefill->active(), 0u);
    EXPECT_EQ(prefill->outstanding_writes(), 0u);
    (void)prefill->TakeEndedRecords();
    EXPECT_EQ(prefill->held(), 0u);
    for (const auto& d : decodes) {
      EXPECT_EQ(d->active(), 0u);
      EXPECT_EQ(d->stats().leased_pages, 0);
    }
  }

 private:
  const KvLayout layout_;

 public:
  Nanos now = 0;
  std::unique_ptr<DevicePool> source;
  std::vector<std::unique_ptr<DevicePool>> targets;
  testing::MemoryTransport wire;
  std::unique_ptr<PrefillRooms> prefill;
  std::vector<std::unique_ptr<DecodeRooms>> decodes;
  std::map<std::string, int> frames;
  std::vector<PostWrite> posted;
  std::vector<ChunkRegistered> registered;
  std::map<RoomId, Aux> ready;
  std::map<RoomId, Status> failed, decode_end, prefill_end;
  int fences = 0;
};

KvLayout Three() { return sluice::testing::MakeLayout(sluice::testing::Small()); }
std::vector<PageId> Pages(std::initializer_list<int32_t> ids) {
  std::vector<PageId> out;
  for (const int32_t id : ids) out.push_back(PageId(id));
  return out;
}
RoomOptions Grouped(int32_t group, bool per_layer = true) {
  RoomOptions o;
  o.layer_group = group;
  o.per_layer = per_layer;
  o.waiting_timeout = o.bootstrap_timeout = o.sending_timeout = 1'000'000'000;
  o.abort_fence = 500'000'000;
  o.abort_repeat = 100'000'000;
  o.tombstone = 10'000'000'000;
  return o;
}

TEST(Link, NoByteOfALayerIsReadBeforeItIsFinalAndTheCachedPrefixGoesWithIt) {
  Link link(Three(), Grouped(1));
  const auto source = Pages({9, 4, 7, 12}), target = Pages({3, 5, 30});
  link.Open(1, 230, 1, target);
  link.prefill->BeginForward(1, 1, {128, 230, true, true}, source, 0);
  link.Finish();
  EXPECT_EQ(link.wire.bytes(), 0) << "nothing is final";
  for (const LogicalLayer layer : Three().layers()) {  // the rows appear just before the hook
    link.Fill(source, layer, 1);
    link.prefill->OnLayerFinal(1, layer, 0);
    link.Finish();
  }
  link.prefill->EndForward(1, OkStatus(), 0);
  link.prefill->SetAux(1, {}, 0);
  link.Finish();
  link.ExpectArrived(1, 1, target);
  EXPECT_EQ(link.prefill->stats().bytes_before_forward_end, link.wire.bytes());
  link.ExpectNothingLeft();
}

TEST(Link, AHookNeverWaitsForTheTransport) {
  Link link(Three(), Grouped(1));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  EXPECT_EQ(link.wire.waiting(), 3u) << "the forward is over and no byte has moved";
  link.prefill->SetAux(1, {}, 0);
  link.Finish();
  link.ExpectArrived(1, 0, Pages({3}));
}

TEST(Link, BothModesMoveTheSameBytesAlsoOfLayersWithoutAHook) {
  for (const bool per_layer : {true, false}) {
    Link link(sluice::testing::MakeLayout(Deep(5), DType::kBF16, DType::kBF16, true), Grouped(2, per_layer));
    const auto source = Pages({9, 4, 7}), target = Pages({3, 5, 30});
    link.Open(1, 190, 0, target);
    link.Forward(1, 1, {0, 100, true, false}, source, 5);
    link.Forward(2, 1, {100, 190, false, true}, source, 5);
    Aux aux;
    aux.first_token = 7;
    link.prefill->SetAux(1, aux, 0);
    link.Finish();
    link.ExpectArrived(1, 0, target);
    EXPECT_EQ(link.ready.at(1), aux);
    const PrefillRoomStats& s = link.prefill->stats();
    EXPECT_EQ(s.layers_sent_at_end, per_layer ? 2 : 0) << "the draft layer, once a chunk";
    EXPECT_EQ(s.latent_bytes + s.index_bytes + s.draft_bytes, s.bytes_sent);
    EXPECT_GT(s.draft_bytes, 0);
    EXPECT_EQ(s.bytes_sent_at_end, per_layer ? s.draft_bytes : 0);
    EXPECT_GT(s.aux_bytes, 0);
    EXPECT_EQ(s.rooms_per_layer, per_layer ? 1 : 0);
    EXPECT_EQ(s.rooms_by_flag, per_layer ? 0 : 1);
    link.ExpectNothingLeft();
  }
}

TEST(Link, RanksWriteTheirOwnPagesAndOneWithoutPagesTakesNoPart) {
  Link link(Three(), Grouped(8), {4, 3});
  const auto source = Pages({4, 9, 8}), target = Pages({5, 3, 31});  // owners 0, 1, 0 of 4
  link.Open(1, 192, 0, target);
  link.Forward(1, 1, {0, 192, true, true}, source);
  link.prefill->SetAux(1, {}, 0);
  link.Finish();
  EXPECT_EQ(link.posted.size(), 2u) << "two of four ranks own pages of it";
  for (const PostWrite& w : link.posted)
    for (const PageMove& m : w.pages) EXPECT_EQ(PageOwner(m.from, 4), PageOwner(w.pages[0].from, 4));
  link.ExpectArrived(1, 0, target);
  link.ExpectNothingLeft();
}

TEST(Link, NoRealDestinationCompletesAtOnceAndIsNoSample) {
  Link link(Three(), Grouped(8), {2, 1});
  link.Open(1, 128, 2, {});
  link.Forward(1, 1, {64, 128, true, true}, Pages({4, 9}));
  link.prefill->SetAux(1, {}, 0);
  link.Carry();
  EXPECT_TRUE(link.ready.contains(1));
  EXPECT_TRUE(link.posted.empty());
  const PrefillRoomStats& s = link.prefill->stats();
  EXPECT_EQ(s.bytes_sent, 0);
  EXPECT_EQ(s.rooms_empty, 1);
  EXPECT_EQ(s.rooms_per_layer + s.rooms_by_flag + s.rooms_by_fault, 0);
  EXPECT_EQ(s.transfer_s, 0);
  link.ExpectNothingLeft();
}

TEST(Link, TwoDestinationsOfOneForwardGetTheirOwnPages) {
  Link link(Three(), Grouped(1), {2, 1, 3});
  link.Open(1, 64, 0, Pages({3}), 0);
  link.Open(2, 64, 0, Pages({3}), 1);
  link.prefill->BeginForward(1, 1, {0, 64, true, true}, Pages({4}), 0);
  link.prefill->BeginForward(1, 2, {0, 64, true, true}, Pages({9}), 0);
  for (const LogicalLayer layer : Three().layers()) {
    link.Fill(Pages({4}), layer, 1);
    link.Fill(Pages({9}), layer, 2);
    link.prefill->OnLayerFinal(1, layer, 0);
  }
  link.prefill->EndForward(1, OkStatus(), 0);
  link.prefill->SetAux(1, {}, 0);
  link.prefill->SetAux(2, {}, 0);
  link.Finish();
  link.ExpectArrived(1, 0, Pages({3}), 0);
  link.ExpectArrived(2, 0, Pages({3}), 1);
  link.ExpectNothingLeft();
}

TEST(Link, AChunkThatCannotBeRegisteredMakesItsRoomMonolithicAndOthersGoOn) {
  Link link(Three(), Grouped(1), {2, 1});
  const auto source = Pages({9, 4, 7, 12}), target = Pages({3, 5, 30, 31});
  link.Open(1, 250, 0, target);
  link.Open(2, 64, 0, Pages({8}));
  link.Forward(1, 1, {0, 100, true, false}, source);
  link.Finish();
  const int64_t before = link.wire.bytes();
  link.Forward(2, 1, {100, 200, false, false}, Pages({9, 4}));  // the pages of the chunk itself are missing
  link.Finish();
  EXPECT_EQ(link.wire.bytes(), before);
  link.Forward(3, 2, {0, 64, true, true}, Pages({20}));
  link.prefill->SetAux(2, {}, 0);
  link.Finish();
  link.ExpectArrived(2, 0, Pages({8}));
  link.Forward(4, 1, {200, 250, false, true}, source);
  link.prefill->SetAux(1, {}, 0);
  link.Finish();
  link.ExpectArrived(1, 0, target);
  EXPECT_EQ(link.prefill->stats().rooms_by_fault, 1);
  EXPECT_EQ(link.prefill->stats().rooms_per_layer, 1);
  bool named = false;
  for (const RoomRecord& r : link.prefill->TakeEndedRecords())
    if (r.room == 1)
      named = std::string_view(r.mode) == "monolithic" &&
              r.fallback.find("fills pages [1, 3), the sequence has 2 pages") != std::string::npos;
  EXPECT_TRUE(named);
  link.ExpectNothingLeft();
}

TEST(Link, PagesThatNobodyEverNamesFailTheirRoomWithTheReason) {
  Link link(Three(), Grouped(1));
  link.Open(1, 128, 0, Pages({3, 5}));
  link.Forward(1, 1, {0, 128, true, true}, Pages({9}));
  link.Finish();
  ASSERT_TRUE(link.failed.contains(1));
  EXPECT_NE(Message(link.failed[1]).find("named 1 of 2 pages"), std::string_view::npos) << link.failed[1];
  link.ExpectNothingLeft();
}

TEST(Link, AFailedWriteGoesAgainWhileThePeerLivesAndWhatWasAcknowledgedDoesNot) {
  Link link(Three(), Grouped(1));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  ASSERT_TRUE(link.wire.Step());
  link.Carry();
  link.wire.FailNext(Unavailable("a dropped packet"));
  link.prefill->SetAux(1, {}, 0);
  link.Finish();
  EXPECT_TRUE(link.ready.contains(1));
  link.ExpectArrived(1, 0, Pages({3}));
  EXPECT_EQ(link.prefill->stats().write_retries, 1);
  EXPECT_EQ(link.wire.bytes(), Three().page_bytes()) << "each layer moved once";
  link.ExpectNothingLeft();
  // The next room of the same peer is none the worse.
  link.Open(2, 64, 0, Pages({5}));
  link.Forward(2, 2, {0, 64, true, true}, Pages({9}));
  link.prefill->SetAux(2, {}, 0);
  link.Finish();
  EXPECT_TRUE(link.ready.contains(2));
}

TEST(Link, AFaultOfTheTransportEndsTheRoomWithItsTextOnBothSides) {
  Link link(Three(), Grouped(1));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  link.wire.FailNext(Internal("bad address"));
  link.Finish();
  ASSERT_TRUE(link.failed.contains(1));
  EXPECT_NE(Message(link.failed[1]).find("bad address"), std::string_view::npos);
  EXPECT_TRUE(link.decode_end.contains(1));
  link.ExpectNothingLeft();
}

TEST(Link, AWriteThatNeverEndsIsCutOffAndTheReportSaysHowFarItCame) {
  Link link(Three(), Grouped(1));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  link.wire.Step();
  link.Carry();
  link.now = 999'999'999;
  link.prefill->Tick(link.now);
  link.Carry();
  EXPECT_EQ(link.prefill->active(), 1u);
  link.now = 1'000'000'001;
  link.prefill->Tick(link.now);
  link.Carry();
  ASSERT_TRUE(link.failed.contains(1));
  const std::string text(Message(link.failed[1]));
  EXPECT_NE(text.find("sending phase"), std::string::npos) << text;
  EXPECT_NE(text.find("1 of 3 layers"), std::string::npos) << text;
  EXPECT_EQ(link.decodes[0]->stats().leased_pages, 0) << "the rest was dropped, so the abort was answered";
  link.ExpectNothingLeft();
}

TEST(Link, AWriteThatNoDropReachesKeepsItsPagesUntilItsPeerIsCut) {
  Link link(Three(), Grouped(8));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  link.wire.Step();  // one layer of three: it has begun and cannot be dropped
  link.Carry();
  link.decodes[0]->Cancel(1, Aborted("the client left"), 0);
  link.Carry();
  EXPECT_EQ(link.frames["AbortAck"], 0);
  EXPECT_EQ(link.decodes[0]->stats().leased_pages, 1);
  EXPECT_FALSE(link.prefill_end.contains(1)) << "its source pages stay leased too";
  link.now = 1'000'000'000;
  link.prefill->Tick(link.now);
  link.Carry();
  EXPECT_EQ(link.fences, 1);
  EXPECT_EQ(link.frames["AbortAck"], 1);
  link.ExpectNothingLeft();
}

TEST(Link, DecodeThatGivesUpNamesPhaseLayersBytesAndTheLastError) {
  Link link(Three(), Grouped(1));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  link.wire.Step();
  link.Carry();
  link.wire.FailNext(Unavailable("a dropped packet"));
  link.wire.Step();
  link.Carry();
  link.decodes[0]->OnFrame(PeerId(0), *Decode(Encode(link.prefill->BeatFor(PeerId(0), 0, 1))), 0);
  link.decodes[0]->Tick(1'000'000'000);
  link.Carry();
  ASSERT_TRUE(link.failed.contains(1));
  const std::string text(Message(link.failed[1]));
  const int64_t first = Three().latent_page_bytes() + Three().index_page_bytes();
  EXPECT_NE(text.find(fmt::format("waiting phase: 1 of 3 layers, {} of {} bytes done; last error: a dropped",
                                  first, Three().page_bytes())),
            std::string::npos)
      << text;
}

TEST(Link, AnAbortInTheMiddleOfAGroupIsAnsweredOnceNothingOfItMoves) {
  Link link(Three(), Grouped(8));
  link.Open(1, 64, 0, Pages({3}));
  link.Forward(1, 1, {0, 64, true, true}, Pages({9}));
  link.wire.Step();
  link.Carry();
  link.decodes[0]->Cancel(1, Aborted("the client left"), 0);
  link.Carry();
  EXPECT_TRUE(link.failed.contains(1)) << "the client hears of it at once";
  EXPECT_FALSE(link.decode_end.contains(1));
  for (int i = 0; i < 3; ++i) {  // repeated while unanswered; each repetition gets the same answer
    link.now += 100'000'000;
    link.decodes[0]->Tick(link.now);
    link.Carry();
  }
  EXPECT_EQ(link.frames["Abort"], 4);
  EXPECT_EQ(link.frames["AbortAck"], 0);
  link.Finish();
  EXPECT_TRUE(link.decode_end.contains(1));
  EXPECT_EQ(link.frames["AbortAck"], 1);
  link.ExpectNothingLeft();
}

TEST(Link, EveryChunkIsRecordedWithWhatEachRankSendsWhere) {
  RoomOptions o = Grouped(8);
  o.record = true;
  Link link(Three(), o, {2, 1});
  link.Open(1, 150, 0, Pages({3, 5, 30}));
  link.Forward(1, 1, {0, 100, true, false}, Pages({4, 9}));
  link.Forward(2, 1, {100, 150, false, true}, Pages({4, 9, 6}));
  ASSERT_EQ(link.registered.size(), 2u);
  EXPECT_EQ(link.registered[0].pages, (PageSpan{0, 1}));
  EXPECT_EQ(link.registered[1].pages, (PageSpan{1, 3}));
  EXPECT_EQ(link.registered[1].moves[0], (std::vector<PageMove>{{2, PageId(6), PageId(30)}}));
  EXPECT_EQ(link.registered[1].moves[1], (std::vector<PageMove>{{1, PageId(9), PageId(5)}}));
}

// For random prefixes on both sides, chunks, ranks, destinations, groups, hooks and faults of registering:
// what is posted is, for each rank, the whole request's mapping, every (layer, page) once, in both modes.
TEST(Link, TheUnionOverChunksAndGroupsIsTheWholeRequestForEveryRank) {
  SeededStream random(11);
  const KvLayout layout = sluice::testing::MakeLayout(Deep(6), DType::kBF16, DType::kBF16, true);
  using Key = std::tuple<int32_t, int32_t, int32_t>;  // layer, source page, destination page
  for (int round = 0; round < 1500; ++round) {
    const int32_t lanes = int32_t(1 + random.Below(8));
    const int64_t prompt = int64_t(1 + random.Below(2000));
    const int32_t pages = int32_t(CeilDiv(prompt, kPageTokens));
    const int64_t cached = int64_t(random.Below(uint64_t((prompt - 1) / kPageTokens + 1))) * kPageTokens;
    const int32_t first_page = int32_t(random.Below(uint64_t(pages + 1)));
    std::vector<PageId> source;
    Reserve reserve{1, 0, uint64_t(prompt), {}, uint32_t(first_page), {}};
    for (int32_t i = 0; i < pages; ++i) source.push_back(PageId(i * 8 + int32_t(random.Below(8))));
    for (int32_t i = first_page; i < pages; ++i) reserve.pages.push_back(i * 3 + int32_t(random.Below(3)));
    std::map<Key, int> whole;
    for (int32_t i = first_page; i < pages; ++i)
      for (const LogicalLayer l : layout.latent_layers())
        ++whole[{l.value, source[size_t(i)].value, reserve.pages[size_t(i - first_page)]}];
    const uint64_t seed = random.Next();
    for (const bool per_layer : {true, false}) {
      SeededStream mine(seed);
      RoomOptions o;
      o.per_layer = per_layer;
      o.lanes = lanes;
      o.layer_group = int32_t(1 + mine.Below(9));
      PrefillRooms rooms(layout, o);
      ASSERT_TRUE(rooms.Add(1, prompt, {}, 0).ok());
      rooms.OnFrame(PeerId(0), reserve, 0);
      std::map<Key, int> sent;
      int64_t step = 0;
      for (int64_t at = cached; at < prompt;) {
        const int64_t end = std::min<int64_t>(prompt, at + 1 + int64_t(mine.Below(700)));
        std::vector<PageId> named(source.begin(), source.begin() + CeilDiv(end, kPageTokens));
        if (end < prompt && mine.Chance(0.1)) named.resize(mine.Below(named.size() + 1));
        rooms.BeginForward(++step, 1, {at, end, at == cached, end == prompt}, named, 0);
        for (const LogicalLayer l : layout.latent_layers())
          for (uint64_t n = mine.Below(3); n > 0; --n) rooms.OnLayerFinal(step, l, 0);
        rooms.EndForward(step, OkStatus(), 0);
        for (const Action& a : rooms.TakeActions()) {
          const auto* w = std::get_if<PostWrite>(&a);
          if (w == nullptr) continue;
          for (const PageMove& m : w->pages) {
            ASSERT_EQ(PageOwner(m.from, lanes), PageOwner(w->pages[0].from, lanes));
            for (const LogicalLayer l : w->layers) ++sent[{l.value, m.from.value, m.to.value}];
          }
        }
        at = end;
      }
      ASSERT_EQ(sent, whole) << "round " << round << (per_layer ? " per layer" : " monolithic");
    }
  }
}

}  // namespace
}  // namespace sluice::transfer
