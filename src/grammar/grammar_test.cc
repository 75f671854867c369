// Character sets, regular expressions, EBNF, and masks against what tokens really do.
#include "base/check.h"
#include "gmock/gmock.h"
#include "grammar/automaton.h"
#include "grammar/syntax.h"
#include "grammar/test_vocabulary.h"
#include "gtest/gtest.h"
#include "text/utf8.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Automaton> Build(GrammarBuilder& builder, ExprPtr body) {
  static const auto* trie =
      new std::shared_ptr<const TokenTrie>(std::make_shared<TokenTrie>(TestVocabulary()));
  auto program = builder.Compile(builder.AddRule("root", std::move(body)));
  SLUICE_CHECK(program.ok(), "{}", Message(program.status()));
  return std::make_shared<Automaton>(std::make_shared<const Program>(*std::move(program)), *trie);
}
bool Matches(Automaton& a, std::string_view text) {
  const int32_t state = a.AfterBytes(a.start(), text);
  return state != Automaton::kDead && a.Accepts(state);
}
std::shared_ptr<Automaton> Regex(std::string_view pattern, RegexMode mode = {}) {
  GrammarBuilder builder;
  auto body = ParseRegex(pattern, mode);
  SLUICE_CHECK(body.ok(), "{}: {}", pattern, Message(body.status()));
  return Build(builder, *body);
}
std::string RegexError(std::string_view pattern) {
  auto body = ParseRegex(pattern, {});
  return body.ok() ? "" : std::string(Message(body.status()));
}
std::string EbnfError(std::string_view text) {
  GrammarBuilder builder;
  auto root = ParseEbnf(text, &builder);
  if (!root.ok()) return std::string(Message(root.status()));
  auto program = builder.Compile(*root);
  return program.ok() ? "" : std::string(Message(program.status()));
}

TEST(CharSet, Utf8SequencesHoldExactlyTheSet) {
  for (const CharSet& set :
       {CharSet{{0x20, 0x7E}}, CharSet{{0x7F, 0x80}}, CharSet{{0xE9, 0x2030}, {0xFFFF, 0x10001}},
        CharSet::All(), CharSet{{0xD7FF, 0xE000}}, CharSet{{0x1F600, 0x1F64F}}.Complement()}) {
    const auto sequences = Utf8Sequences(set);
    for (char32_t c = 0; c <= kCodepointMax; c += c < 0x3000 ? 1 : 37) {
      if (c >= 0xD800 && c < 0xE000) continue;
      std::string bytes;
      AppendUtf8(c, &bytes);
      bool in = false;
      for (const Utf8Sequence& s : sequences) {
        bool all = s.length == int(bytes.size());
        for (int i = 0; i < s.length && all; ++i)
          all = uint8_t(bytes[size_t(i)]) >= s.bytes[i].low && uint8_t(bytes[size_t(i)]) <= s.bytes[i].high;
        in |= all;
      }
      ASSERT_EQ(in, set.Has(c)) << uint32_t(c);
    }
  }
}

TEST(Regex, MatchesTheWholeText) {
  const struct {
    const char* pattern;
    std::vector<std::string> yes, no;
  } kCases[] = {
      {"abc", {"abc"}, {"", "ab", "abcd", "ABC"}},
      {"a|bc|", {"a", "bc", ""}, {"abc", "b"}},
      {"(ab)*c+d?", {"c", "ababccd"}, {"abab", "cdd"}},
      {"a{2}b{1,3}c{2,}", {"aabcc", "aabbbccccc"}, {"abcc", "aabc", "aabbbbcc"}},
      {"[a-c\\]x-]+", {"a]x-"}, {"d", "\\"}},
      {"[^a\\d]", {"b", "é", "🤗", "\n"}, {"a", "7", "", "bb"}},
      {".", {"a", "é", "🤗"}, {"\n", ""}},
      {"\\d\\w\\s\\D\\W\\S", {"1_ a.b"}, {"11 1.b"}},
      {"\\x41\\u00e9\\u{1F917}\\.\\\\", {"Aé🤗.\\"}, {"Aé🤗x\\"}},
      {"(?:x(?<n>y)z)+?", {"xyz", "xyzxyz"}, {"xy"}},
      {"^ab$|^cd", {"ab", "cd"}, {"abcd"}},
      {"(a|ab)(c|bcd)(d*)", {"abcd", "acd", "abbcd"}, {"abc d"}},
      {"(a*)*b", {"b", "aaab"}, {"a"}},
      {"[+-]?\\d+(\\.\\d+)?", {"-12.5", "0"}, {"1.", ".5"}},
  };
  for (const auto& c : kCases) {
    const auto a = Regex(c.pattern);
    for (const std::string& text : c.yes) EXPECT_TRUE(Matches(*a, text)) << c.pattern << " and " << text;
    for (const std::string& text : c.no) EXPECT_FALSE(Matches(*a, text)) << c.pattern << " and " << text;
  }
}

TEST(Regex, SearchesInsideJsonStrings) {
  const auto anywhere = Regex("a\"b", {.json_string = true, .search = true});
  EXPECT_TRUE(Matches(*anywhere, "xx a\\\"b yy\\n"));
  EXPECT_FALSE(Matches(*anywhere, "xx a\"b"));
  const auto half = Regex("^a|b$", {.json_string = true, .search = true});
  EXPECT_TRUE(Matches(*half, "ax"));
  EXPECT_TRUE(Matches(*half, "xb"));
  EXPECT_FALSE(Matches(*half, "xax"));
}

TEST(Regex, RefusesByName) {
  EXPECT_THAT(RegexError("a(?=b)"), HasSubstr("look-around"));
  EXPECT_THAT(RegexError("(a)\\1"), HasSubstr("back references"));
  EXPECT_THAT(RegexError("\\bx"), HasSubstr("\\b"));
  EXPECT_THAT(RegexError("\\p{L}"), HasSubstr("\\p"));
  EXPECT_THAT(RegexError("a^b"), HasSubstr("'^'"));
  for (const char* bad :
       {"(", ")", "[a", "a{2", "*a", "a**", "[b-a]", "a{3,2}", "\\", "a{99999999}", "\\xZ1", "[\\d-z"}) {
    EXPECT_NE(RegexError(bad), "") << bad;
  }
  EXPECT_THAT(RegexError(std::string(5000, '(')), HasSubstr("too deeply"));
}

TEST(Ebnf, RulesRecursionAndEscapes) {
  GrammarBuilder builder;
  auto root = ParseEbnf(R"x(# sums
    root ::= sum
    sum ::= term (("+" | "-") term)*   # comment
    term ::= [0-9]+ | "(" sum ")" | "\u00e9\n" | 'x'{2,3}
  )x",
                        &builder);
  ASSERT_TRUE(root.ok()) << root.status();
  const auto a = Build(builder, RuleExpr(*root));
  for (const char* yes : {"1", "1+(2-3)", "((((7))))", "é\n+xx", "xxx"}) EXPECT_TRUE(Matches(*a, yes)) << yes;
  for (const char* no : {"", "1+", "(1", "x", "xxxx", "1 + 2"}) EXPECT_FALSE(Matches(*a, no)) << no;
}

TEST(Ebnf, RefusesByName) {
  EXPECT_THAT(EbnfError("a ::= \"x\""), HasSubstr("no rule named root"));
  EXPECT_THAT(EbnfError("root ::= b"), HasSubstr("rule b is used and not defined"));
  EXPECT_THAT(EbnfError("root ::= \"x\"\nroot ::= \"y\""), HasSubstr("twice"));
  EXPECT_THAT(EbnfError("root ::= root \"x\" | \"y\""), HasSubstr("left recursion"));
  EXPECT_THAT(EbnfError("root ::= a root | \"x\"\na ::= \"\" | \"y\""), HasSubstr("left recursion"));
  EXPECT_THAT(EbnfError("root ::= \"x\" root"), HasSubstr("never ends"));
  EXPECT_THAT(EbnfError("root ::= \"x"), HasSubstr("not closed in line 1"));
  EXPECT_THAT(EbnfError("root ::= (\"x\"{20000}){20000}"), HasSubstr("states"));
  for (const char* bad :
       {"root ::= [", "root ::= (", "root", "root ::= \"\\q\"", "::=", "root ::= \"a\"{2", ""}) {
    EXPECT_NE(EbnfError(bad), "") << bad;
  }
}

TEST(Text, WithoutAnEndMarker) {
  for (const std::string end : {"</arg_value>", "aab", "</｜DSML｜parameter>"}) {
    GrammarBuilder builder;
    const auto a = Build(builder, TextWithout(&builder, end));
    for (const std::string& text :
         {std::string("x"), end.substr(0, end.size() - 1), std::string("<</arg"), std::string("é🤗\n")})
      EXPECT_TRUE(Matches(*a, text)) << end << " in " << text;
    EXPECT_FALSE(Matches(*a, end));
    EXPECT_FALSE(Matches(*a, "x" + end.substr(0, 1) + end + "y"));
  }
}

// The mask of a state is exactly what its tokens do one by one, on a walk through nested JSON.
TEST(Automaton, MasksAreWhatTokensDo) {
  const TestVocabulary vocabulary;
  GrammarBuilder builder;
  const auto a = Build(builder, AnyJsonObject(false, &builder));
  int32_t state = a->start();
  const std::string text =
      R"({"name": {"a": [1, -1.5e3, true, null, [[]]], "é\n\u00e9": "🤗\ud83e\udd17"}, "b": ""})";
  for (size_t i = 0; i <= text.size(); ++i) {
    const auto mask = a->Mask(state);
    const auto closing = a->ClosingMask(state, 1 << 20);
    EXPECT_EQ(*mask, *a->Mask(state));
    for (int32_t t = 0; t < vocabulary.vocab_size(); ++t) {
      const bool special = vocabulary.IsSpecial(t);
      const bool can = !special && a->AfterToken(state, t, vocabulary.TokenBytes(t)) != Automaton::kDead;
      ASSERT_EQ(((*mask)[size_t(t) / 64] >> (t % 64)) & 1, can)
          << "token " << t << " after " << text.substr(0, i);
    }
    for (size_t w = 0; w < mask->size(); ++w) ASSERT_EQ((*closing)[w] & ~(*mask)[w], 0u);
    if (i == text.size()) break;
    state = a->AfterBytes(state, text.substr(i, 1));
    ASSERT_NE(state, Automaton::kDead) << text.substr(0, i + 1);
  }
  EXPECT_TRUE(a->Accepts(state));
}

TEST(Automaton, PositionsMoveToAnotherOne) {
  GrammarBuilder builder;
  const auto a = Build(builder, AnyJsonObject(false, &builder));
  GrammarBuilder again;
  const auto b = Build(again, AnyJsonObject(false, &again));
  const std::string head = R"({"a": [{"b": [1, 2)", tail = "]}], \"c\": 5}";
  const int32_t moved = a->MoveTo(a->AfterBytes(a->start(), head), b.get());
  const int32_t end = b->AfterBytes(moved, tail);
  ASSERT_NE(end, Automaton::kDead);
  EXPECT_TRUE(b->Accepts(end));
  EXPECT_EQ(b->BytesLeft(moved), 4);
}

TEST(Automaton, DeepNestingIsKnownAndItsWayOutIsOffered) {
  GrammarBuilder builder;
  const auto a = Build(builder, AnyJsonObject(false, &builder));
  int32_t state = a->AfterBytes(a->start(), "{\"a\":");
  int deep = 0;
  for (; !a->Deep(state) && deep < 5000; ++deep) state = a->AfterBytes(state, "[");
  ASSERT_LT(deep, 5000);
  const int32_t left = a->BytesLeft(state);
  const auto mask = a->ClosingMask(state, left - 1);
  EXPECT_NE((*mask)[size_t(']') / 64] >> (']' % 64) & 1, 0u);
  EXPECT_EQ((*mask)[size_t('[') / 64] >> ('[' % 64) & 1, 0u);
}

}  // namespace
}  // namespace sluice
