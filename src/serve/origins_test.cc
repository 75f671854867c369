#include "serve/origins.h"

#include "gtest/gtest.h"

namespace sluice {
namespace {

HttpRequest From(const std::string& origin, const std::string& host = "sluice.example") {
  HttpRequest r{.method = "POST", .path = "/v1/chat/completions"};
  if (!origin.empty()) r.headers.emplace_back("origin", origin);
  r.headers.emplace_back("host", host);
  return r;
}

TEST(Origins, AreListsOfSchemeAndHost) {
  for (const char* good : {"", "*", "https://a.example", "http://localhost:3000, https://b.example"}) {
    EXPECT_TRUE(Origins::Parse(good).ok()) << good;
  }
  for (const char* bad : {"a.example", "https://", "://a", "https://a.example/", "https://*.example", "null",
                          "https://a\r\nX: y"}) {
    const auto origins = Origins::Parse(bad);
    ASSERT_FALSE(origins.ok()) << bad;
    EXPECT_NE(std::string(origins.status().message()).find("--cors-origins"), std::string::npos);
  }
}

TEST(Origins, OnlyExactMatchesAreAllowed) {
  const Origins o = Origins::Parse("https://a.example").value();
  EXPECT_EQ(o.AnswerHeaders(From("https://a.example")).front().second, "https://a.example");
  for (const char* other :
       {"", "http://a.example", "https://a.example:444", "https://a.example.evil", "null"}) {
    EXPECT_TRUE(o.AnswerHeaders(From(other)).empty()) << other;
  }
  EXPECT_EQ(Origins::Parse("*").value().AnswerHeaders(From("https://any.example")).front().second, "*");
  EXPECT_TRUE(Origins().AnswerHeaders(From("https://a.example")).empty());
}

TEST(Origins, ForeignIsAPageThatIsNeitherAllowedNorOurOwn) {
  const Origins o = Origins::Parse("https://a.example").value();
  EXPECT_FALSE(o.Foreign(From("")));
  EXPECT_FALSE(o.Foreign(From("https://a.example")));
  EXPECT_FALSE(o.Foreign(From("http://sluice.example:30000", "sluice.example:30000")));
  EXPECT_TRUE(o.Foreign(From("http://sluice.example:1", "sluice.example:30000")));
  EXPECT_TRUE(o.Foreign(From("https://b.example")));
  EXPECT_TRUE(o.Foreign(From("null")));
}

TEST(Origins, PreflightsEchoNoHeaderThatCouldBreakTheAnswer) {
  const Origins o = Origins::Parse("*").value();
  HttpRequest r = From("https://a.example");
  r.method = "OPTIONS";
  EXPECT_FALSE(o.Preflight(r).has_value());  // a plain OPTIONS
  r.headers.emplace_back("access-control-request-method", "POST");
  r.headers.emplace_back("access-control-request-headers", "x-a\"; evil");
  const auto answer = o.Preflight(r);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, 204);
  EXPECT_EQ(answer->headers.back().second, "Authorization, Content-Type");
}

}  // namespace
}  // namespace sluice
