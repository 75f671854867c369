#include "storage/open_storage.h"

#include "storage/storage_fixture.h"

namespace sluice {
namespace {

std::string Complaint(std::string_view backend, std::string_view extra, std::string_view directory = "") {
  auto s = OpenStorage(backend, extra, directory, TestFormat(), nullptr);
  return s.ok() ? "" : std::string(Message(s.status()));
}

TEST(OpenStorage, FileTakesItsDirectoryFromTheConfigOrTheDefault) {
  TempDirectory dir;
  for (const std::string& extra :
       {std::string(),
        R"({"directory": ")" + dir.path() + R"(/named", "capacity_gb": 0.5, "engine": "threads"})"}) {
    auto s = OpenStorage("file", extra, dir.path() + "/default", TestFormat(), nullptr);
    ASSERT_TRUE(s.ok()) << s.status();
    EXPECT_EQ(PutPage(s->get(), 1), StorageOutcome::kOk);
    EXPECT_EQ((*s)->Stats().capacity_bytes, extra.empty() ? 0 : 500'000'000);
    EXPECT_NE((*s)->Describe().find(extra.empty() ? "/default" : "/named blocking"), std::string::npos);
  }
}

TEST(OpenStorage, WrongConfigIsRefusedWithWhatIsKnown) {
  EXPECT_NE(Complaint("s3", "").find("file, redis"), std::string::npos);
  EXPECT_NE(Complaint("file", "[1]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(Complaint("file", "{").find("not a JSON object"), std::string::npos);
  EXPECT_NE(Complaint("file", R"({"dir": "/x"})").find("capacity_gb"), std::string::npos);
  EXPECT_NE(Complaint("file", R"({"threads": 0})").find("threads cannot be 0"), std::string::npos);
  EXPECT_NE(Complaint("file", R"({"direct_io": 1})").find("direct_io"), std::string::npos);
  EXPECT_NE(Complaint("file", R"({"engine": "aio"})", "/tmp").find("aio"), std::string::npos);
  EXPECT_NE(Complaint("redis", R"({"port": 70000})").find("70000"), std::string::npos);
  EXPECT_NE(Complaint("file", "").find("directory"), std::string::npos);
  for (const char* bad : {"[1]", R"({"dir": "/x"})", R"({"threads": 0})"})
    EXPECT_TRUE(Complaint("file", bad).starts_with("--hicache-storage-backend-extra-config: ")) << bad;
}

TEST(OpenStorage, ACapacityOfLessThanOneObjectIsRefusedWithTheLeast) {
  TempDirectory dir;
  const auto with = [](const std::string& gb) { return R"({"capacity_gb": )" + gb + "}"; };
  for (const char* small : {"1e-12", "1e-6"}) {
    const std::string said = Complaint("file", with(small), dir.path());
    const size_t at = said.find("use at least ");
    ASSERT_NE(at, std::string::npos) << said;
    const std::string least = said.substr(at + 13, said.find(',', at) - at - 13);
    auto s = OpenStorage("file", with(least), dir.path(), TestFormat(), nullptr);
    ASSERT_TRUE(s.ok()) << s.status();
    EXPECT_EQ(PutPage(s->get(), 1), StorageOutcome::kOk);
  }
  EXPECT_EQ(Complaint("file", with("0"), dir.path()), "");
}

}  // namespace
}  // namespace sluice
