// Whole models against the outputs of independent implementations.
#include "model/golden.h"

#include <gtest/gtest.h>

#include "ops/reference/reference_backend.h"

namespace sluice {
namespace {

struct Case {
  std::string model, golden;
};

std::string Root() { return SLUICE_SOURCE_DIR; }

StatusOr<GoldenReport> Compare(const Case& c, ops::Backend& backend, DType kv) {
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(Root() + "/" + c.model));
  ASSIGN_OR_RETURN(auto checkpoint, Checkpoint::Open(Root() + "/" + c.model));
  ASSIGN_OR_RETURN(auto model, Model::Load(config, std::move(checkpoint), backend));
  RunnerOptions o;
  ASSIGN_OR_RETURN(o.max_context, GoldenContext(Root() + "/" + c.golden));
  o.latent_dtype = o.index_dtype = kv;
  o.threads = 2;
  ASSIGN_OR_RETURN(auto runner, SequenceRunner::Make(*model, backend, o));
  return CompareWithGolden(*model, *runner, Root() + "/" + c.golden);
}

class Goldens : public testing::TestWithParam<std::string> {};

TEST_P(Goldens, AreReproducedByTheReferenceBackendInFloat32) {
  const std::string dir = "tests/data/tiny-random/" + GetParam();
  auto backend = ops::MakeReferenceBackend();
  auto r = Compare({dir, dir}, *backend, DType::kF32);
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_EQ(r->prompts, 3);
  EXPECT_LE(r->max_rel_err, 2e-4);
  EXPECT_TRUE(r->greedy_equal);
  EXPECT_EQ(r->greedy_tokens, 96);
  RecordProperty("max_rel_err", std::to_string(r->max_rel_err));
}

INSTANTIATE_TEST_SUITE_P(Tiny, Goldens,
                         testing::Values("glm-moe-dsa", "deepseek-v32", "deepseek-v3", "deepseek-v2",
                                         "glm4-moe-lite"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace sluice
