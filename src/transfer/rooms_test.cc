// Both room tables in one small world: a network that loses, doubles, delays and reorders frames, one-sided
// writes that land when they like, instances that crash or stop. Every byte that lands is checked against the
// lease of its page.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>

#include "base/random.h"
#include "transfer/decode_rooms.h"
#include "transfer/prefill_rooms.h"

namespace sluice::transfer {
namespace {

constexpr Nanos kMs = 1'000'000;
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

uint64_t RowValue(RoomId room, int32_t ordinal, int32_t layer) {
  return room * 1000003ull + uint64_t(ordinal) * 101 + uint64_t(layer) + 1;
}

struct Faults {
  double drop = 0, duplicate = 0, delay = 0;
  double crash = 0, stop = 0, abort = 0, write_error = 0;
};

class World {
 public:
  World(uint64_t seed, const Faults& faults, int prefills, int decodes)
      : random_(seed), faults_(faults), layout_(Layout()) {
    options_.bootstrap_timeout = 3000 * kMs;
    options_.waiting_timeout = 3000 * kMs;
    options_.abort_repeat = 200 * kMs;
    options_.abort_fence = 1500 * kMs;
    options_.tombstone = 20000 * kMs;
    options_.layer_group = int32_t(1 + random_.Below(4));
    options_.per_layer = !random_.Chance(0.2);
    for (int i = 0; i < prefills; ++i) prefill_.push_back({});
    for (int i = 0; i < decodes; ++i) decode_.push_back({});
    for (int i = 0; i < prefills; ++i) StartPrefill(i);
    for (int d = 0; d < decodes; ++d) {
      decode_[d].rooms = std::make_unique<DecodeRooms>(layout_, options_);
      decode_[d].lease.assign(64, 0);
      decode_[d].memory.assign(64, std::vector<uint64_t>(kLayers, 0));
    }
  }

  void Run(int rooms) {
    for (int i = 0; i < rooms; ++i) At(Nanos(random_.Below(4000)) * kMs, [this] { NewRoom(); });
    for (Nanos t = 0; t < 60000 * kMs; t += 100 * kMs) At(t, [this] { Beat(); });
    while (!events_.empty() && violation_.empty()) {
      auto [at, fn] = std::pair(events_.top().at, events_.top().fn);
      events_.pop();
      now_ = at;
      if (now_ > 12000 * kMs) faults_ = {};  // faults end, everything must settle
      fn();
      Drain();
    }
    if (!violation_.empty()) return;
    for (size_t d = 0; d < decode_.size(); ++d) {
      Expect(decode_[d].rooms->active() == 0, "decode has active rooms at the end");
      Expect(decode_[d].rooms->stats().leased_pages == 0, "decode counts leased pages at the end");
      for (const RoomId lease : decode_[d].lease) Expect(lease == 0, "a decode page is leased at the end");
    }
    for (PrefillSide& p : prefill_) {
      Expect(p.rooms->active() == 0, "prefill has active rooms at the end");
      Expect(p.rooms->outstanding_writes() == 0, "writes are outstanding at the end");
    }
    for (const auto& [id, room] : rooms_) {
      Expect(room.decode_ended == 1, "a room ended not exactly once on decode");
      Expect(room.ready + room.failed == 1, "a client got not exactly one outcome");
    }
  }

  const std::string& violation() const { return violation_; }
  int ready = 0, failed = 0;

 private:
  struct Event {
    Nanos at;
    int64_t seq;
    std::function<void()> fn;
    bool operator<(const Event& o) const { return at != o.at ? at > o.at : seq > o.seq; }
  };
  struct PrefillSide {
    std::unique_ptr<PrefillRooms> rooms;
    uint64_t epoch = 0;
    Nanos stopped_until = 0;
    std::set<RoomId> running;
  };
  struct DecodeSide {
    std::unique_ptr<DecodeRooms> rooms;
    std::vector<RoomId> lease;                  // page -> room, 0 free
    std::vector<std::vector<uint64_t>> memory;  // page x layer
    std::map<int, Nanos> last_beat;
    std::map<int, bool> lost;
  };
  struct RoomState {
    int prefill = 0, decode = 0;
    int64_t tokens = 0;
    int32_t first_page = 0;
    std::vector<PageId> pages;
    int ready = 0, failed = 0, decode_ended = 0;
  };

  // Both sides name the same connection: side index in the low bits, the connection's number above.
  PeerId Peer(int side, int p) const { return PeerId(connection_.at(p) * 16 + side); }

  void Expect(bool ok, const std::string& what) {
    if (!ok && violation_.empty()) violation_ = what;
  }
  void At(Nanos t, std::function<void()> fn) { events_.push({std::max(t, now_), seq_++, std::move(fn)}); }

  void StartPrefill(int i) {
    prefill_[i].epoch = ++epochs_;
    RoomOptions o = options_;
    o.epoch = prefill_[i].epoch;
    prefill_[i].rooms = std::make_unique<PrefillRooms>(layout_, o);
    prefill_[i].running.clear();
    ++connection_[i];
  }

  void NewRoom() {
    const RoomId id = ++last_room_;
    RoomState& r = rooms_[id];
    r.prefill = int(random_.Below(prefill_.size()));
    r.decode = int(random_.Below(decode_.size()));
    r.tokens = int64_t(1 + random_.Below(900));
    r.first_page = int32_t(random_.Below(uint64_t(CeilDiv(r.tokens, kPageTokens)) + 1));
    DecodeSide& d = decode_[r.decode];
    const int32_t need = RequestPages(r.tokens, r.first_page).size();
    for (int32_t p = 0; p < int32_t(d.lease.size()) && int32_t(r.pages.size()) < need; ++p)
      if (d.lease[p] == 0) r.pages.push_back(PageId(p));
    if (int32_t(r.pages.size()) < need) {
      rooms_.erase(
          id);  // no room in the pool: the request waits in the queue, which is not this table's business
      return;
    }
    for (const PageId p : r.pages) d.lease[p.value] = id;
    const Digest256 digest = Digest256{uint8_t(id)};
    const int prefill = r.prefill, decode = r.decode;
    const int64_t tokens = r.tokens;
    Expect(d.rooms
               ->Open(id, Peer(prefill, prefill), prefill_[prefill].epoch, tokens, digest, r.first_page,
                      r.pages, now_)
               .ok(),
           "open refused");
    Expect(!d.rooms->Open(id, Peer(prefill, prefill), 0, tokens, digest, r.first_page, r.pages, now_).ok(),
           "a duplicate room was taken");
    const uint64_t epoch = prefill_[prefill].epoch;
    At(now_ + Nanos(random_.Below(300)) * kMs, [=, this] {
      if (prefill_[prefill].epoch == epoch) (void)prefill_[prefill].rooms->Add(id, tokens, digest, now_);
    });
    if (random_.Chance(faults_.abort))
      At(now_ + Nanos(random_.Below(2500)) * kMs,
         [=, this] { decode_[decode].rooms->Cancel(id, Aborted("client left"), now_); });
    if (random_.Chance(faults_.abort * 0.5))
      At(now_ + Nanos(random_.Below(2500)) * kMs,
         [=, this] { prefill_[prefill].rooms->Cancel(id, Aborted("prefill side"), now_); });
  }

  void Beat() {
    for (size_t p = 0; p < prefill_.size(); ++p) {
      if (random_.Chance(faults_.crash)) Crash(int(p));
      if (random_.Chance(faults_.stop)) prefill_[p].stopped_until = now_ + Nanos(random_.Below(4000)) * kMs;
      if (now_ < prefill_[p].stopped_until) continue;
      prefill_[p].rooms->Tick(now_);
      for (size_t d = 0; d < decode_.size(); ++d)
        Send(int(p), int(d), false,
             Heartbeat{prefill_[p].epoch, 0, prefill_[p].rooms->RoomsOf(Peer(int(d), int(p)))});
    }
    for (size_t d = 0; d < decode_.size(); ++d) {
      decode_[d].rooms->Tick(now_);
      for (size_t p = 0; p < prefill_.size(); ++p) {
        Nanos& last = decode_[d].last_beat[int(p)];
        if (last != 0 && now_ - last > 1000 * kMs) {
          last = now_;
          decode_[d].rooms->OnPeerLost(Peer(int(p), int(p)), Unavailable("heartbeat missing"), false, now_);
        }
      }
    }
  }

  void Crash(int p) {
    const PeerId old = Peer(p, p);
    StartPrefill(p);  // a new process answers at the address; writes of the old one died with it
    for (size_t d = 0; d < decode_.size(); ++d) {
      At(now_ + kMs,
         [=, this] { decode_[d].rooms->OnPeerLost(old, Unavailable("connection reset"), true, now_); });
    }
  }

  void Send(int p, int d, bool to_prefill, const ControlMessage& m) {
    const int copies = random_.Chance(faults_.drop) ? 0 : random_.Chance(faults_.duplicate) ? 2 : 1;
    const auto bytes = Encode(m);
    const int connection = connection_[p];
    for (int i = 0; i < copies; ++i) {
      const Nanos latency = random_.Chance(faults_.delay) ? Nanos(random_.Below(1500)) * kMs : kMs;
      At(now_ + latency, [=, this] { Deliver(p, d, to_prefill, connection, bytes); });
    }
  }
  void Deliver(int p, int d, bool to_prefill, int connection, const std::vector<std::byte>& bytes) {
    const auto got = Decode(bytes);
    Expect(got.ok(), "a frame did not decode");
    if (connection != connection_[p]) return;  // the connection is closed
    if (to_prefill) {
      if (now_ < prefill_[p].stopped_until) {
        At(prefill_[p].stopped_until, [=, this] { Deliver(p, d, to_prefill, connection, bytes); });
        return;
      }
      prefill_[p].rooms->OnFrame(Peer(d, p), *got, now_);
    } else {
      decode_[d].last_beat[p] = now_;
      decode_[d].rooms->OnFrame(Peer(p, p), *got, now_);
    }
  }

  void Drain() {
    for (size_t p = 0; p < prefill_.size(); ++p)
      for (Action& a : prefill_[p].rooms->TakeActions()) OnPrefillAction(int(p), a);
    for (size_t d = 0; d < decode_.size(); ++d)
      for (Action& a : decode_[d].rooms->TakeActions()) OnDecodeAction(int(d), a);
  }

  void OnPrefillAction(int p, Action& action) {
    if (auto* send = std::get_if<SendFrame>(&action)) {
      if (send->peer.value / 16 == connection_[p]) Send(p, send->peer.value % 16, false, send->message);
    } else if (auto* ready_room = std::get_if<RoomReady>(&action)) {
      const RoomId id = ready_room->room;
      const uint64_t epoch = prefill_[p].epoch;
      prefill_[p].running.insert(id);
      const int64_t cached =
          int64_t(random_.Below(uint64_t((rooms_.at(id).tokens - 1) / kPageTokens) + 1)) * kPageTokens;
      At(now_ + Nanos(random_.Below(500)) * kMs, [=, this] { Forward(p, epoch, id, cached, true); });
    } else if (auto* write = std::get_if<PostWrite>(&action)) {
      StartWrite(p, *write);
    } else if (auto* ended = std::get_if<RoomEnded>(&action)) {
      prefill_[p].running.erase(ended->room);
      ended_on_prefill_.insert({p, prefill_[p].epoch, ended->room});
    }
  }

  bool Alive(int p, uint64_t epoch) const { return prefill_[p].epoch == epoch; }

  void Forward(int p, uint64_t epoch, RoomId id, int64_t start, bool first) {
    if (!Alive(p, epoch)) return;
    if (now_ < prefill_[p].stopped_until)
      return At(prefill_[p].stopped_until, [=, this] { Forward(p, epoch, id, start, first); });
    if (!prefill_[p].running.contains(id)) return;  // the scheduler drops an ended room's request
    const RoomState& r = rooms_.at(id);
    const int64_t end = std::min<int64_t>(r.tokens, start + 1 + int64_t(random_.Below(300)));
    const int64_t step = ++steps_;
    std::vector<PageId> source;
    for (int32_t i = 0; i < int32_t(CeilDiv(end, kPageTokens)); ++i) source.push_back(PageId(i));
    const Chunk chunk{start, end, first, end == r.tokens};
    prefill_[p].rooms->BeginForward(step, id, chunk, source);
    prefill_[p].rooms->BeginForward(step, id, chunk, source);  // batch forming visits a request several times
    Nanos at = now_;
    for (int layer = 0; layer < kLayers - 1; ++layer) {
      at += Nanos(random_.Below(20)) * kMs;
      const int repeats = random_.Chance(0.1) ? 2 : 1;
      for (int k = 0; k < repeats; ++k)
        At(at, [=, this] {
          if (Alive(p, epoch)) prefill_[p].rooms->OnLayerFinal(step, LogicalLayer(layer), now_);
        });
    }
    At(at + kMs, [=, this] {
      if (!Alive(p, epoch)) return;
      const bool bad = random_.Chance(faults_.write_error * 0.2);
      prefill_[p].rooms->EndForward(step, bad ? Internal("device error") : OkStatus(), now_);
      if (bad) return;
      if (chunk.last) {
        Aux aux;
        aux.first_token = int32_t(id);
        prefill_[p].rooms->SetAux(id, aux, now_);
      } else {
        At(now_ + kMs, [=, this] { Forward(p, epoch, id, end, false); });
      }
    });
  }

  void StartWrite(int p, const PostWrite& write) {
    const uint64_t epoch = prefill_[p].epoch;
    const int connection = write.peer.value / 16;
    const int d = write.peer.value % 16;
    Nanos at = now_;
    for (const LogicalLayer layer : write.layers)
      for (const PageMove& move : write.pages) {
        at += Nanos(random_.Below(3)) * kMs;
        At(at, [=, this] { Land(p, epoch, connection, d, write.room, layer.value, move); });
      }
    const bool error = random_.Chance(faults_.write_error);
    At(at + kMs, [=, this] {
      if (!Alive(p, epoch)) return;
      const bool cut = cut_.contains({p, connection, d});
      prefill_[p].rooms->OnWriteDone(write.id, error || cut ? Unavailable("write failed") : OkStatus(), now_);
    });
  }

  void Land(int p, uint64_t epoch, int connection, int d, RoomId room, int layer, const PageMove& move) {
    if (!Alive(p, epoch) || cut_.contains({p, connection, d})) return;
    Expect(!ended_on_prefill_.contains({p, epoch, room}),
           "a write read the source pages of a room that ended on prefill");
    Expect(decode_[d].lease[move.to.value] == room, "a write landed on a page that decode had taken back");
    decode_[d].memory[move.to.value][layer] = RowValue(room, move.ordinal, layer);
  }

  void OnDecodeAction(int d, Action& action) {
    if (auto* send = std::get_if<SendFrame>(&action)) {
      if (send->peer.value / 16 == connection_[send->peer.value % 16])
        Send(send->peer.value % 16, d, true, send->message);
    } else if (auto* r = std::get_if<RoomReady>(&action)) {
      RoomState& room = rooms_.at(r->room);
      ++room.ready;
      ++ready;
      Expect(r->aux.first_token == int32_t(r->room), "aux of another room");
      for (size_t i = 0; i < room.pages.size(); ++i)
        for (int layer = 0; layer < kLayers; ++layer)
          Expect(decode_[d].memory[room.pages[i].value][layer] ==
                     RowValue(r->room, room.first_page + int32_t(i), layer),
                 "a room is ready with rows that are not its own");
    } else if (auto* f = std::get_if<RoomFailed>(&action)) {
      ++rooms_.at(f->room).failed;
      ++failed;
      Expect(!f->status.ok(), "failed without a reason");
    } else if (auto* ended = std::get_if<RoomEnded>(&action)) {
      RoomState& room = rooms_.at(ended->room);
      ++room.decode_ended;
      for (const PageId p : room.pages) {
        Expect(decode_[d].lease[p.value] == ended->room, "a page was given back twice");
        decode_[d].lease[p.value] = 0;
      }
    } else if (auto* fence = std::get_if<FencePeer>(&action)) {
      // Cutting a connection closes it for every decode of this small world; both ends learn of it.
      const int p = fence->peer.value % 16, connection = fence->peer.value / 16;
      const PeerId at_decode = fence->peer;
      At(now_ + Nanos(random_.Below(100)) * kMs, [=, this] {
        if (connection != connection_[p]) return decode_[d].rooms->OnFenced(at_decode, now_);
        cut_.insert({p, connection, d});
        ++connection_[p];
        const uint64_t epoch = prefill_[p].epoch;
        for (size_t other = 0; other < decode_.size(); ++other) {
          cut_.insert({p, connection, int(other)});
          decode_[other].rooms->OnFenced(at_decode, now_);
          At(std::max(now_ + kMs, prefill_[p].stopped_until), [=, this] {
            if (Alive(p, epoch))
              prefill_[p].rooms->OnPeerLost(PeerId(connection * 16 + int(other)),
                                            Unavailable("decode cut the connection"), now_);
          });
        }
      });
    }
  }

  SeededStream random_;
  Faults faults_;
  KvLayout layout_;
  RoomOptions options_;
  Nanos now_ = 0;
  int64_t seq_ = 0, steps_ = 0;
  uint64_t epochs_ = 0;
  RoomId last_room_ = 0;
  std::priority_queue<Event> events_;
  std::vector<PrefillSide> prefill_;
  std::vector<DecodeSide> decode_;
  std::map<RoomId, RoomState> rooms_;
  std::map<int, int> connection_;
  std::set<std::tuple<int, int, int>> cut_;
  std::set<std::tuple<int, uint64_t, RoomId>> ended_on_prefill_;
  std::string violation_;
};

// A few seeds in every run; SLUICE_ROOM_SEEDS=20000 searches.
void RunSeeds(const Faults& faults, int seeds, int prefills, int decodes, bool expect_all_ready) {
  if (const char* more = std::getenv("SLUICE_ROOM_SEEDS")) seeds = std::atoi(more);
  int ready = 0, failed = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    World world(uint64_t(seed), faults, prefills, decodes);
    world.Run(12);
    ASSERT_EQ(world.violation(), "") << "seed " << seed;
    ready += world.ready;
    failed += world.failed;
  }
  EXPECT_GT(ready, 0);
  if (expect_all_ready) {
    EXPECT_EQ(failed, 0);
  } else {
    EXPECT_GT(failed, 0) << "the faults of this test did nothing";
  }
}

TEST(Rooms, WithoutFaultsEveryRoomArrivesWhole) { RunSeeds({}, 25, 2, 2, true); }
TEST(Rooms, SurviveALossyNetwork) {
  RunSeeds({.drop = 0.05, .duplicate = 0.1, .delay = 0.2}, 25, 2, 2, false);
}
TEST(Rooms, SurviveAbortStorms) { RunSeeds({.delay = 0.1, .abort = 0.7}, 25, 2, 2, false); }
TEST(Rooms, SurviveCrashesAndStops) {
  RunSeeds({.delay = 0.05, .crash = 0.01, .stop = 0.02}, 25, 2, 2, false);
}
TEST(Rooms, SurviveEverythingAtOnce) {
  RunSeeds({.drop = 0.03,
            .duplicate = 0.05,
            .delay = 0.1,
            .crash = 0.01,
            .stop = 0.02,
            .abort = 0.3,
            .write_error = 0.05},
           40, 2, 3, false);
}

TEST(Rooms, AbortIsAnsweredOnlyWhenNoWriteIsOutstanding) {
  PrefillRooms rooms(Layout(), {});
  ASSERT_TRUE(rooms.Add(1, 64, {}, 0).ok());
  rooms.OnFrame(PeerId(0), Reserve{1, 0, 64, {}, 0, {3}}, 0);
  const PageId source[] = {PageId(9)};
  rooms.BeginForward(1, 1, {0, 64, true, true}, source);
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
    rooms.BeginForward(1, 1, {0, 100, true, true}, source);
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
  rooms.BeginForward(1, 1, {64, 128, true, true}, source);
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
