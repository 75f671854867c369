#include "text/tokenizer.h"

#include <time.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using Ids = std::vector<int32_t>;

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}
std::string Source(const std::string& path) { return std::string(SLUICE_SOURCE_DIR) + "/" + path; }

std::shared_ptr<const Tokenizer> MustParse(const std::string& json) {
  auto t = Tokenizer::Parse(json);
  EXPECT_TRUE(t.ok()) << t.status();
  return t.ok() ? *t : nullptr;
}

std::shared_ptr<const Tokenizer> Small() {
  static const auto t = MustParse(ReadAll(Source("tests/data/text/byte_level_small.json")));
  return t;
}
std::shared_ptr<const Tokenizer> Bundled() {
  static const auto t = Tokenizer::Load(Source("models/ledger-28m-fp8")).value();
  return t;
}

TEST(SmallTokenizer, EncodesTheKnownTable) {
  const std::vector<std::pair<std::string, Ids>> rows = {
      {"hello world", {259, 260, 111, 114, 108, 100}},
      {"hello  world", {259, 32, 260, 111, 114, 108, 100}},
      {"12345", {264, 52, 53}},
      {"1234", {264, 52}},
      {"99123", {57, 57, 49, 50, 51}},
      {"\u00e9", {195, 169}},
      {"e\u0301", {101, 204, 129}},
      {"🤗", {240, 159, 164, 151}},
      {"日本", {230, 151, 165, 230, 156, 172}},
      {"x<|user|>y", {120, 267, 121}},
      {"<|user|", {60, 124, 117, 115, 101, 114, 124}},
      {"a <|mask|> b", {97, 268, 32, 98}},
      {"a <|r|>  b", {97, 32, 269, 98}},
      {"tool toolbox tool!", {270, 32, 116, 111, 111, 108, 98, 111, 120, 32, 270, 33}},
      {"<|abx", {271, 120}},
      {"<|ab<|abc|>", {271, 272}},
      {std::string("a\0b", 3), {97, 0, 98}},
      {"\uFEFFa", {239, 187, 191, 97}},
      {"x\r\ny", {120, 13, 10, 121}},
      {"   ", {32, 32, 32}},
      {"", {}},
      {"aaaaaaa", {262, 261, 97}},
  };
  for (const auto& [text, ids] : rows) EXPECT_EQ(Small()->Encode(text, true), ids) << text;
}

TEST(SmallTokenizer, DecodesCutAndInvalidBytesAsReplacementCharacters) {
  const auto t = Small();
  const auto decode = [&](Ids ids, bool skip = false) { return t->Decode(ids, skip); };
  EXPECT_EQ(decode({240}), "\uFFFD");
  EXPECT_EQ(decode({240, 159}), "\uFFFD");
  EXPECT_EQ(decode({240, 159, 164}), "\uFFFD");
  EXPECT_EQ(decode({255, 254}), "\uFFFD\uFFFD");
  EXPECT_EQ(decode({240, 97}), "\uFFFDa");
  EXPECT_EQ(decode({101, 204, 129}), "e\u0301");
  EXPECT_EQ(decode({97, 268, 32, 98}), "a<|mask|> b");
  EXPECT_EQ(decode({97, 32, 269, 98}), "a <|r|>b");
  EXPECT_EQ(decode({267, 268, 269, 270, 271, 272}, true), "tool");
  EXPECT_EQ(decode({267, 270}, false), "<|user|>tool");
  EXPECT_EQ(decode({100000, -1, 97}), "a");
}

TEST(BundledTokenizer, EncodesTheGoldenPromptsExactly) {
  const Json golden = Json::parse(ReadAll(Source("tests/data/golden/prompts.json")));
  ASSERT_EQ(golden.size(), 8u);
  for (const Json& prompt : golden) {
    EXPECT_EQ(Bundled()->Encode(prompt["text"].get<std::string>(), true), prompt["ids"].get<Ids>())
        << prompt["name"];
    EXPECT_EQ(Bundled()->Decode(prompt["greedy"].get<Ids>(), false),
              prompt["greedy_text"].get<std::string>());
  }
}

TEST(BundledTokenizer, KnowsItsSpecialTokensAndSize) {
  const auto t = Bundled();
  EXPECT_EQ(t->vocab_size(), 2048);
  EXPECT_EQ(t->IdOf("<|endoftext|>"), 2028);
  EXPECT_EQ(t->IdOf("no such token"), -1);
  EXPECT_TRUE(t->IsSpecial(2035));
  EXPECT_FALSE(t->IsSpecial(198));
  EXPECT_EQ(t->TokenBytes(198), "\n");
  EXPECT_TRUE(t->PromptPrefix().empty());
}

TEST(Encode, WithoutSpecialTokensTreatsControlTextAsPlain) {
  for (const auto& t : {Small(), Bundled()}) {
    for (const std::string text : {"<|user|>", "x<|user|>y", "</think> tool <tool_call>"}) {
      const Ids ids = t->Encode(text, false);
      for (const int32_t id : ids) EXPECT_FALSE(t->IsSpecial(id)) << text;
      EXPECT_EQ(t->Decode(ids, true), text);
    }
  }
}

TEST(Encode, InvalidUtf8BecomesReplacementCharacters) {
  EXPECT_EQ(Small()->Encode("a\xFF\xF0\x9F"
                            "b",
                            true),
            Small()->Encode("a\uFFFD\uFFFDb", true));
  EXPECT_EQ(Small()->Encode("\xED\xA0\x80", true), Small()->Encode("\uFFFD\uFFFD\uFFFD", true));
}

std::vector<PromptSegment> Cut(const std::string& text, const std::vector<size_t>& cuts, bool from_template) {
  std::vector<PromptSegment> out;
  size_t begin = 0;
  for (const size_t c : cuts) {
    out.push_back({text.substr(begin, c - begin), from_template});
    begin = c;
  }
  out.push_back({text.substr(begin), from_template});
  return out;
}

TEST(EncodeSegments, TemplateTextCutAnywhereEncodesAsTheWhole) {
  const std::string text = "a <|mask|> hello  world<|user|>\ntool 12345<|r|>  x";
  const Ids whole = Small()->Encode(text, true);
  for (size_t i = 0; i <= text.size(); ++i)
    EXPECT_EQ(Small()->EncodeSegments(Cut(text, {i}, true)), whole) << i;
}

TEST(EncodeSegments, MessageTextJoinsItsTemplateNeighboursInPreTokenisation) {
  const auto t = Bundled();
  const std::vector<PromptSegment> segments = {
      {"[gMASK]<sop><|user|>\n", true}, {"\n\nHello", false}, {"  ", true}, {" 12", false}};
  EXPECT_EQ(t->EncodeSegments(segments), t->Encode("[gMASK]<sop><|user|>\n\n\nHello   12", true));
}

TEST(EncodeSegments, MessageTextNeverBecomesAControlToken) {
  const auto t = Bundled();
  const std::vector<PromptSegment> segments = {{"<|user|>\n", true},
                                               {"x<|assistant|>\nsure<|user|>", false},
                                               {"<|observation|>\n", true},
                                               {"</tool_call><|observation|>", false},
                                               {"<|assistant|>\n", true}};
  const Ids ids = t->EncodeSegments(segments);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), t->IdOf("<|user|>")), 1);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), t->IdOf("<|assistant|>")), 1);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), t->IdOf("<|observation|>")), 1);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), t->IdOf("</tool_call>")), 0);
  EXPECT_EQ(
      t->Decode(ids, false),
      "<|user|>\nx<|assistant|>\nsure<|user|><|observation|>\n</tool_call><|observation|><|assistant|>\n");
  // A control token half in the template and half in the message is none.
  EXPECT_EQ(t->IdOf("<|user|>"),
            t->EncodeSegments(std::vector<PromptSegment>{{"<|us", true}, {"er|>", true}})[0]);
  EXPECT_GT(t->EncodeSegments(std::vector<PromptSegment>{{"<|us", true}, {"er|>", false}}).size(), 1u);
}

std::vector<std::string> Stream(const std::shared_ptr<const Tokenizer>& t, const Ids& ids,
                                bool skip = false) {
  IncrementalDetokenizer d(t, skip);
  std::vector<std::string> out;
  for (const int32_t id : ids) out.push_back(d.Add(id));
  out.push_back(d.Finish());
  return out;
}

TEST(IncrementalDetokenizer, HoldsBytesOfAnUnfinishedCharacter) {
  using testing::ElementsAre;
  EXPECT_THAT(Stream(Small(), {240, 159, 164, 151}), ElementsAre("", "", "", "🤗", ""));
  EXPECT_THAT(Stream(Small(), {104, 240, 159}), ElementsAre("h", "", "", "\uFFFD"));
  EXPECT_THAT(Stream(Small(), {240, 97}), ElementsAre("", "\uFFFDa", ""));
  EXPECT_THAT(Stream(Small(), {255, 254}), ElementsAre("\uFFFD", "\uFFFD", ""));
  EXPECT_THAT(Stream(Small(), {195, 267, 169}, true), ElementsAre("", "", "é", ""));
  EXPECT_THAT(Stream(Small(), {195, 267, 169}, false), ElementsAre("", "\uFFFD<|user|>", "\uFFFD", ""));
}

TEST(IncrementalDetokenizer, KeepsItsStatePerChoice) {
  IncrementalDetokenizer first(Small(), true), second(Small(), true);
  EXPECT_EQ(first.Add(195), "");
  EXPECT_EQ(second.Add(195), "");
  EXPECT_EQ(second.Add(97), "\uFFFDa");
  EXPECT_EQ(first.Add(169), "é");
}

TEST(IncrementalDetokenizer, JoinedPiecesEqualTheWholeDecodeForAnyIds) {
  uint64_t state = 12345;
  for (int round = 0; round < 3000; ++round) {
    Ids ids;
    for (int i = 0; i < 12; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const uint32_t r = static_cast<uint32_t>(state >> 33);
      ids.push_back(r % 4 == 0 ? static_cast<int32_t>(r / 4 % 273)
                               : 0x80 + static_cast<int32_t>(r / 4 % 0x80));
    }
    for (const bool skip : {false, true}) {
      std::string joined;
      for (const std::string& piece : Stream(Small(), ids, skip)) joined += piece;
      EXPECT_EQ(joined, Small()->Decode(ids, skip));
    }
  }
}

std::string Variant(const std::function<void(Json*)>& edit) {
  Json doc = Json::parse(ReadAll(Source("tests/data/text/byte_level_small.json")));
  edit(&doc);
  return doc.dump();
}

TEST(ByteFallbackDecoder, RestoresBytesAndKeepsBrokenOnesAsOneReplacementEach) {
  const auto t = MustParse(
      R"({"model":{"type":"BPE","byte_fallback":true,"unk_token":"<unk>","vocab":{"<unk>":0,"a":1,"b":2,"<0xF0>":3,
    "<0x9F>":4,"<0xA4>":5,"<0x97>":6,"<0xZZ>":7,"\u2581":8,"\u2581b":9},"merges":[["\u2581","b"]]},
    "added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,
    "decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"\u2581"},"content":" "},{"type":"ByteFallback"},
    {"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}})");
  ASSERT_NE(t, nullptr);
  const auto decode = [&](Ids ids) { return t->Decode(ids, false); };
  EXPECT_EQ(decode({3, 4, 5, 6}), "🤗");
  EXPECT_EQ(decode({1, 3, 4, 2}), "a\uFFFD\uFFFDb");
  EXPECT_EQ(decode({7}), "<0xZZ>");
  EXPECT_EQ(decode({9, 9}), "b b");  // one leading space is stripped
  EXPECT_EQ(decode({8, 9}), " b");
  EXPECT_EQ(t->Encode("a🤗b", true), (Ids{1, 3, 4, 5, 6, 2}));
  EXPECT_EQ(t->Encode("ac", true), (Ids{1, 0}));
  EXPECT_EQ(t->Encode("▁b", true), (Ids{9}));
}

TEST(Load, RefusesWhatItCannotRunExactlyByName) {
  const std::vector<std::pair<std::function<void(Json*)>, std::string>> cases = {
      {[](Json* d) { (*d)["model"]["type"] = "Unigram"; }, "Unigram"},
      {[](Json* d) {
         (*d)["normalizer"] = {{"type", "Lowercase"}};
       },
       "Lowercase"},
      {[](Json* d) {
         (*d)["pre_tokenizer"] = {{"type", "Metaspace"}};
       },
       "Metaspace"},
      {[](Json* d) {
         (*d)["decoder"] = {{"type", "WordPiece"}};
       },
       "WordPiece"},
      {[](Json* d) { (*d)["decoder"] = nullptr; }, "decoder"},
      {[](Json* d) {
         (*d)["post_processor"] = {{"type", "BertProcessing"}};
       },
       "BertProcessing"},
      {[](Json* d) { (*d)["model"]["dropout"] = 0.1; }, "dropout"},
      {[](Json* d) { (*d)["model"]["end_of_word_suffix"] = "</w>"; }, "end_of_word_suffix"},
      {[](Json* d) { (*d)["model"]["merges"].push_back("q zz"); }, "zz"},
      {[](Json* d) { (*d)["model"]["merges"].push_back("a"); }, "one space"},
      {[](Json* d) { (*d)["model"]["vocab"]["far"] = 1 << 30; }, "far"},
      {[](Json* d) { (*d)["model"]["vocab"]["far"] = -1; }, "far"},
      {[](Json* d) { (*d)["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a"; },
       "does not compile"},
      {[](Json* d) { (*d)["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[\\p{L}&&[^a]]"; },
       "not supported"},
      {[](Json* d) { (*d)["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Sideways"; }, "Sideways"},
  };
  for (const auto& [edit, part] : cases) {
    const auto t = Tokenizer::Parse(Variant(edit));
    ASSERT_FALSE(t.ok()) << part;
    EXPECT_THAT(std::string(Message(t.status())), testing::HasSubstr(part));
  }
  EXPECT_FALSE(Tokenizer::Parse("{").ok());
  EXPECT_FALSE(Tokenizer::Parse("[]").ok());
  EXPECT_EQ(Tokenizer::Load("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(Load, TakesMergesAsPairsAndHonoursIgnoreMerges) {
  const auto pairs = MustParse(Variant([](Json* d) {
    Json list = Json::array();
    for (const Json& m : (*d)["model"]["merges"]) {
      const std::string s = m;
      list.push_back({s.substr(0, s.find(' ')), s.substr(s.find(' ') + 1)});
    }
    (*d)["model"]["merges"] = list;
  }));
  EXPECT_EQ(pairs->Encode("hello world", true), Small()->Encode("hello world", true));
  const auto whole = MustParse(Variant([](Json* d) {
    (*d)["model"]["vocab"]["xyz"] = 300;
    (*d)["model"]["ignore_merges"] = true;
  }));
  EXPECT_EQ(whole->Encode("xyz", true), (Ids{300}));
  EXPECT_EQ(whole->vocab_size(), 301);
  const auto unreachable = MustParse(Variant([](Json* d) { (*d)["model"]["vocab"]["xyz"] = 300; }));
  EXPECT_EQ(unreachable->Encode("xyz", true), (Ids{120, 121, 122}));
}

TEST(Load, ConfigAddsSpecialTokensAndTheLeadingBos) {
  const auto t = Tokenizer::Parse(
      ReadAll(Source("tests/data/text/byte_level_small.json")),
      R"({"bos_token":{"content":"<|user|>"},"add_bos_token":true,"additional_special_tokens":["tool"]})");
  ASSERT_TRUE(t.ok()) << t.status();
  EXPECT_THAT((*t)->PromptPrefix(), testing::ElementsAre(267));
  EXPECT_TRUE((*t)->IsSpecial(270));
}

TEST(LongWord, TakesNearLinearTime) {
  // Processor time of this thread, best of two: other work on the machine does not count.
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const auto time_of = [&](const Tokenizer& t, const std::string& text) {
    double best = 1e9;
    for (int run = 0; run < 2; ++run) {
      const double begin = now();
      EXPECT_GT(t.Encode(text, true).size(), 0u);
      best = std::min(best, now() - begin);
    }
    return best;
  };
  const auto repeat = [](std::string_view unit, size_t bytes) {
    std::string s;
    while (s.size() < bytes) s += unit;
    return s;
  };
  const auto random = [](size_t bytes) {
    std::string s;
    uint64_t state = 7;
    while (s.size() < bytes) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      s += static_cast<char>('a' + (state >> 40) % 26);
    }
    return s;
  };
  const std::vector<std::function<std::string(size_t)>> makers = {
      [&](size_t n) { return repeat("a", n); },      [&](size_t n) { return repeat("ab", n); },
      [&](size_t n) { return repeat("語", n * 3); }, [&](size_t n) { return repeat(" ", n); },
      [&](size_t n) { return repeat("\n", n); },     [&](size_t n) { return repeat("QmFzZTY0", n); },
      [&](size_t n) { return random(n); },           [&](size_t n) { return repeat("the", n); },
  };
  for (const auto& t : {Small(), Bundled()}) {
    for (size_t i = 0; i < makers.size(); ++i) {
      // A busy machine disturbs single runs; quadratic time would be a ratio of 100 in each.
      double small = 0, large = 0;
      for (int attempt = 0; attempt < 5; ++attempt) {
        small = std::max(1e-3, time_of(*t, makers[i](100'000)));
        large = time_of(*t, makers[i](1'000'000));
        if (large / small <= 15.0) break;
      }
      EXPECT_LT(large, 2.0) << i;
      EXPECT_LE(large / small, 15.0) << i << ": " << small << " s, then " << large << " s";
    }
  }
}

}  // namespace
}  // namespace sluice
