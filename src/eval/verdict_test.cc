#include "eval/verdict.h"

#include "gtest/gtest.h"

namespace sluice::eval {
namespace {

constexpr char kExpected[] = R"({"core_kinds":["attr"],"bf16":{"index":{"buckets":{"512":0.9,"1024":0.9}}}})";

// `wrong` of 100 answers of bucket 512 are wrong, the last ones; those before `attr` are of a core kind.
struct Case {
  Dataset data;
  PassResult pass;
  Case(int wrong, int attr, const std::string& bucket = "512") {
    data.has_sure = data.has_reference = true;
    Session s;
    s.bucket = bucket;
    for (int i = 0; i < 100; ++i) {
      Turn t;
      t.kind = i < attr ? "attr" : "hold";
      t.sure = i < 50;
      t.reference_ok = i < 90;
      s.turns.push_back(t);
    }
    data.sessions.push_back(s);
    pass.name = "warm";
    for (int i = 0; i < 100; ++i) {
      TurnResult r;
      r.session = &data.sessions[0];
      r.turn = &data.sessions[0].turns[size_t(i)];
      r.right = i < 100 - wrong;
      pass.turns.push_back(r);
    }
  }
  bool Holds(const std::string& name) {
    const auto verdicts = Judge(pass, data, ParseExpected(kExpected).value());
    for (const Verdict& v : verdicts) {
      if (v.name == name) return v.holds;
    }
    ADD_FAILURE() << name << " was not judged";
    return false;
  }
};

TEST(Verdict, ABucketHoldsWithinItsSamplingErrorOnly) {
  // 100 answers at 0.9: 1.96 standard errors are 5.88 points.
  EXPECT_TRUE(Case(10, 10).Holds("bucket 512"));
  EXPECT_TRUE(Case(15, 10).Holds("bucket 512"));
  EXPECT_FALSE(Case(16, 10).Holds("bucket 512"));
  EXPECT_TRUE(Case(5, 10).Holds("bucket 512"));
  EXPECT_FALSE(Case(4, 10).Holds("bucket 512"));  // too good is another data set
  EXPECT_FALSE(Case(10, 10, "2048").Holds("bucket 2048")) << "no expected share";
}

TEST(Verdict, OneWrongCoreAnswerFails) {
  EXPECT_TRUE(Case(10, 90).Holds("core kinds"));
  EXPECT_FALSE(Case(10, 91).Holds("core kinds"));
}

TEST(Verdict, SureAnswersAndAgreementHaveTheirBounds) {
  EXPECT_TRUE(Case(10, 10).Holds("sure"));
  EXPECT_FALSE(Case(51, 10).Holds("sure"));  // one of fifty
  EXPECT_TRUE(Case(15, 10).Holds("agreement"));
  EXPECT_FALSE(Case(16, 10).Holds("agreement"));
}

TEST(Verdict, APassNamedAfterATierNeedsAHitFromIt) {
  PassResult pass;
  pass.turns.resize(2);
  pass.turns[0].answer.prompt_tokens = 300;
  pass.turns[0].answer.cached = {64, 0, 0};
  for (const char* name : {"cold", "warm"}) {
    pass.name = name;
    EXPECT_TRUE(JudgeTier(pass, 65).holds);
    EXPECT_EQ(JudgeTier(pass, 65).line, "");
  }
  for (const char* name : {"l2", "l3"}) {
    pass.name = name;
    pass.turns[1].answer.cached = {};
    EXPECT_FALSE(JudgeTier(pass, 300).holds) << name;
    EXPECT_NE(JudgeTier(pass, 300).line.find(std::string("pass ") + name + ": no token came from that tier"),
              std::string::npos);
    EXPECT_TRUE(JudgeTier(pass, 301).holds);
    EXPECT_NE(JudgeTier(pass, 301).line.find("the longest has 300 tokens, and 301 are needed"),
              std::string::npos);
    pass.turns[1].answer.cached = {0, 64, 0};
    EXPECT_EQ(JudgeTier(pass, 300).holds, pass.name == "l2");
    pass.turns[1].answer.cached = {0, 0, 64};
    EXPECT_EQ(JudgeTier(pass, 300).holds, pass.name == "l3");
  }
}

TEST(Verdict, FilesThatAreNotExpectationsAreRefused) {
  for (const char* text : {"", "[]", "{}", R"({"core_kinds":[]})",
                           R"({"core_kinds":[],"bf16":{"index":{"buckets":{"512":"0.9"}}}})",
                           R"({"core_kinds":[],"bf16":{"index":{"buckets":{"512":1.5}}}})",
                           R"({"core_kinds":[5],"bf16":{"index":{"buckets":{}}}})"}) {
    EXPECT_FALSE(ParseExpected(text).ok()) << text;
  }
  EXPECT_FALSE(ReadExpected("/nonexistent/expected.json").ok());
}

TEST(Sample, KeepsTheSameSessionsOfEveryBucketForASeed) {
  Dataset d;
  for (int i = 0; i < 40; ++i) {
    Session s;
    s.id = "s" + std::to_string(i);
    s.bucket = i % 2 == 0 ? "512" : "1024";
    d.sessions.push_back(s);
  }
  const auto ids = [](Dataset x, int64_t n, uint64_t seed) {
    SampleSessions(&x, n, seed);
    std::vector<std::string> out;
    for (const Session& s : x.sessions) out.push_back(s.id);
    return out;
  };
  const auto five = ids(d, 5, 1);
  EXPECT_EQ(five.size(), 10u);
  EXPECT_EQ(five, ids(d, 5, 1));
  EXPECT_NE(five, ids(d, 5, 2));
  EXPECT_EQ(ids(d, 100, 1).size(), 40u);
  for (const std::string& id : five) {  // a larger sample holds the smaller one
    const auto six = ids(d, 6, 1);
    EXPECT_NE(std::find(six.begin(), six.end(), id), six.end());
  }
}

}  // namespace
}  // namespace sluice::eval
