#include "weights/checkpoint.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "config/json_fields.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::string DataDir() { return std::string(SLUICE_SOURCE_DIR) + "/tests/data/"; }
std::string LedgerDir() { return std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8"; }

struct Blob {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using Blobs = std::map<std::string, Blob>;

Blobs ReadAll(const std::string& path) {
  Blobs blobs;
  auto f = SafetensorsFile::Open(path);
  EXPECT_TRUE(f.ok()) << f.status();
  for (const StoredTensor& t : (*f)->tensors()) {
    blobs[t.name] = {t.dtype_name, t.shape,
                     std::string(reinterpret_cast<const char*>(t.data), size_t(t.bytes))};
  }
  return blobs;
}

void Write(const std::string& path, const Blobs& blobs, size_t pad = 0) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, b] : blobs) {
    header[name] = {{"dtype", b.dtype},
                    {"shape", b.shape},
                    {"data_offsets", {data.size(), data.size() + b.bytes.size()}}};
    data += b.bytes;
  }
  std::string text = header.dump();
  text.append(8 - text.size() % 8 + pad, ' ');
  std::ofstream out(path, std::ios::binary);
  const uint64_t n = text.size();
  out.write(reinterpret_cast<const char*>(&n), 8);
  out << text << data;
}

std::string Fresh(const std::string& name) {
  const std::string dir = testing::TempDir() + "/sluice_checkpoint_" + name;
  fs::remove_all(dir);
  fs::create_directories(dir);
  return dir;
}

ModelConfig Config(const std::string& dir, const ModelOverrides& o = {}) {
  auto c = LoadModelConfig(dir, o);
  EXPECT_TRUE(c.ok()) << c.status();
  return *c;
}

std::string OpenError(const std::string& dir) {
  auto c = Checkpoint::Open(dir);
  EXPECT_FALSE(c.ok());
  return std::string(c.status().message());
}

// The tiny GLM checkpoint with one change.
std::string ValidateError(const std::function<void(Blobs&)>& change, const ModelOverrides& o = {}) {
  const std::string dir = Fresh("changed");
  Blobs blobs = ReadAll(DataDir() + "tiny-random/glm-moe-dsa/model.safetensors");
  change(blobs);
  Write(dir + "/model.safetensors", blobs);
  auto c = Checkpoint::Open(dir);
  EXPECT_TRUE(c.ok()) << c.status();
  const Status s = (*c)->Validate(Config(DataDir() + "tiny-random/glm-moe-dsa", o), false);
  EXPECT_FALSE(s.ok());
  return std::string(s.message());
}

TEST(Checkpoint, ValidatesEveryFolderOfTheTree) {
  for (std::string name : {"glm-moe-dsa", "deepseek-v32", "deepseek-v3", "deepseek-v2", "glm4-moe-lite"}) {
    const std::string dir = DataDir() + "tiny-random/" + name;
    auto c = Checkpoint::Open(dir);
    ASSERT_TRUE(c.ok()) << c.status();
    EXPECT_TRUE((*c)->Validate(Config(dir), false).ok()) << (*c)->Validate(Config(dir), false);
  }
  auto c = Checkpoint::Open(LedgerDir());
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_TRUE((*c)->Validate(Config(LedgerDir()), false).ok());
  ASSERT_EQ((*c)->notices().size(), 1u);
  EXPECT_THAT((*c)->notices()[0], HasSubstr("draft (MTP)"));
  EXPECT_TRUE((*c)->Validate(Config(LedgerDir()), true).ok()) << (*c)->Validate(Config(LedgerDir()), true);
  EXPECT_TRUE((*c)->notices().empty());
  EXPECT_TRUE((*c)->SameBytes("lm_head.weight", "model.layers.6.shared_head.head.weight"));
  EXPECT_FALSE((*c)->SameBytes("lm_head.weight", "model.embed_tokens.weight"));
}

TEST(Checkpoint, MissingExtraAndMisshapenTensorsAreNamed) {
  EXPECT_THAT(ValidateError([](Blobs& b) { b.erase("model.layers.1.self_attn.o_proj.weight"); }),
              AllOf(HasSubstr("model.layers.1.self_attn.o_proj.weight"), HasSubstr("missing")));
  EXPECT_THAT(
      ValidateError([](Blobs& b) { b["model.layers.1.self_attn.extra.weight"] = b["model.norm.weight"]; }),
      AllOf(HasSubstr("model.layers.1.self_attn.extra.weight"), HasSubstr("not part of"),
            HasSubstr("model.safetensors")));
  EXPECT_THAT(ValidateError([](Blobs& b) {
                b["lm_head.weight"].shape = {128, 256};
              }),
              AllOf(HasSubstr("lm_head.weight"), HasSubstr("[128, 256]"), HasSubstr("[256, 128]")));
  EXPECT_THAT(ValidateError([](Blobs& b) { b["model.norm.weight"].dtype = "I16"; }),
              AllOf(HasSubstr("model.norm.weight"), HasSubstr("I16")));
  EXPECT_THAT(ValidateError([](Blobs& b) { b["lm_head.weight_scale_inv"] = b["model.norm.weight"]; }),
              HasSubstr("lm_head.weight_scale_inv"));
}

TEST(Checkpoint, AHeadBesideTiedEmbeddingsMustBeTheirCopy) {
  ModelOverrides tied;
  tied.json = R"({"tie_word_embeddings": true})";
  EXPECT_THAT(ValidateError([](Blobs&) {}, tied),
              AllOf(HasSubstr("\"lm_head.weight\" differs from \"model.embed_tokens.weight\""),
                    HasSubstr("tie_word_embeddings")));
  const std::string dir = Fresh("tied");
  for (const bool head : {true, false}) {
    Blobs blobs = ReadAll(DataDir() + "tiny-random/glm-moe-dsa/model.safetensors");
    blobs["lm_head.weight"] = blobs["model.embed_tokens.weight"];
    if (!head) blobs.erase("lm_head.weight");
    Write(dir + "/model.safetensors", blobs);
    auto c = Checkpoint::Open(dir);
    ASSERT_TRUE(c.ok()) << c.status();
    const Status s = (*c)->Validate(Config(DataDir() + "tiny-random/glm-moe-dsa", tied), false);
    EXPECT_TRUE(s.ok()) << s;
  }
}

TEST(Checkpoint, EveryComputingLayerMustHaveItsIndexer) {
  // The checkpoint carries indexers on layers 0, 1 and 3 only.
  ModelOverrides all;
  all.json = R"({"indexer_types": null, "index_topk_freq": 1})";
  EXPECT_THAT(ValidateError([](Blobs&) {}, all),
              AllOf(HasSubstr("model.layers.2.self_attn.indexer"), HasSubstr("layer 2"), HasSubstr("FFFF")));
  EXPECT_THAT(ValidateError([](Blobs& b) { b.erase("model.layers.3.self_attn.indexer.k_norm.bias"); }),
              AllOf(HasSubstr("model.layers.3.self_attn.indexer.k_norm.bias"), HasSubstr("FFSF")));
}

TEST(Checkpoint, IndexersOfReusingLayersAreAllowedAndReportedOnce) {
  // DeepSeek-V3.2 carries an indexer on every layer; frequency 4 makes layers 2 and 3 reuse.
  const std::string dir = DataDir() + "tiny-random/deepseek-v32";
  auto c = Checkpoint::Open(dir);
  ASSERT_TRUE(c.ok());
  ModelOverrides o;
  o.index_topk_freq = 4;
  ASSERT_TRUE((*c)->Validate(Config(dir, o), false).ok());
  ASSERT_EQ((*c)->notices().size(), 1u);
  EXPECT_THAT((*c)->notices()[0], AllOf(HasSubstr("layers 2, 3"), HasSubstr("FFSS")));
  o.index_topk_freq = 1;
  ASSERT_TRUE((*c)->Validate(Config(dir, o), false).ok());
  EXPECT_TRUE((*c)->notices().empty());
}

TEST(IndexFile, RulesAreEnforced) {
  const Blobs all = ReadAll(DataDir() + "tiny-random/deepseek-v3/model.safetensors");
  Blobs first, second;
  Json map = Json::object();
  size_t i = 0;
  for (const auto& [name, b] : all) {
    const bool one = i++ % 2 == 0;
    (one ? first : second)[name] = b;
    map[name] = one ? "a.safetensors" : "b.safetensors";
  }
  const std::string dir = Fresh("index");
  const auto write = [&](const Json& weight_map) {
    std::ofstream(dir + "/model.safetensors.index.json") << Json({{"weight_map", weight_map}}).dump();
  };
  Write(dir + "/a.safetensors", first);
  Write(dir + "/b.safetensors", second);
  write(map);
  auto c = Checkpoint::Open(dir);
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_TRUE((*c)->Validate(Config(DataDir() + "tiny-random/deepseek-v3"), false).ok());

  Json m = map;
  m["lm_head.weight"] = "../x.safetensors";
  write(m);
  EXPECT_THAT(OpenError(dir), AllOf(HasSubstr("../x.safetensors"), HasSubstr("outside the model folder")));
  m["lm_head.weight"] = "/etc/passwd";
  write(m);
  EXPECT_THAT(OpenError(dir), HasSubstr("outside the model folder"));
  m["lm_head.weight"] = "c.safetensors";
  write(m);
  EXPECT_THAT(OpenError(dir), AllOf(HasSubstr("c.safetensors"), HasSubstr("fetch the missing file")));
  m = map;
  m["nothing.weight"] = "a.safetensors";
  write(m);
  EXPECT_THAT(OpenError(dir), AllOf(HasSubstr("nothing.weight"), HasSubstr("not in its shard")));
  m = map;
  m["lm_head.weight"] = map["lm_head.weight"] == "a.safetensors" ? "b.safetensors" : "a.safetensors";
  write(m);
  EXPECT_THAT(OpenError(dir), AllOf(HasSubstr("lm_head.weight"), HasSubstr("is in")));
  m = map;
  m.erase("lm_head.weight");
  write(m);
  EXPECT_THAT(OpenError(dir), AllOf(HasSubstr("lm_head.weight"), HasSubstr("not in the index file")));
  write(map);
  second["lm_head.weight"] = first["lm_head.weight"] = all.at("lm_head.weight");
  Write(dir + "/a.safetensors", first);
  Write(dir + "/b.safetensors", second);
  EXPECT_THAT(OpenError(dir), AllOf(HasSubstr("lm_head.weight"), HasSubstr("already in")));
  fs::remove(dir + "/model.safetensors.index.json");
  EXPECT_THAT(OpenError(dir), HasSubstr("fetch the index file"));
  EXPECT_THAT(OpenError(Fresh("empty")), HasSubstr("no *.safetensors"));
  EXPECT_THAT(OpenError("/nonexistent"), HasSubstr("not a folder"));
}

// A one-matrix FP8 model is enough for the block rules: the second shard of the ledger model, changed.
std::string Fp8Error(const std::function<void(Blobs&)>& change) {
  const std::string dir = Fresh("fp8");
  for (const char* name : {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                           "model-00003-of-00003.safetensors", "model.safetensors.index.json"}) {
    fs::create_symlink(LedgerDir() + "/" + name, dir + "/" + name);
  }
  const std::string shard = dir + "/model-00003-of-00003.safetensors";
  Blobs blobs = ReadAll(shard);
  change(blobs);
  fs::remove(shard);
  Write(shard, blobs);
  std::ifstream in(LedgerDir() + "/model.safetensors.index.json");
  Json index = Json::parse(in);
  Json map = Json::object();
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (file != "model-00003-of-00003.safetensors") map[name] = file;
  }
  for (const auto& [name, b] : blobs) map[name] = "model-00003-of-00003.safetensors";
  index["weight_map"] = map;
  fs::remove(dir + "/model.safetensors.index.json");
  std::ofstream(dir + "/model.safetensors.index.json") << index.dump();
  auto c = Checkpoint::Open(dir);
  if (!c.ok()) return std::string(c.status().message());
  const Status s = (*c)->Validate(Config(LedgerDir()), true);
  if (!s.ok()) return std::string(s.message());
  for (const auto& [name, b] : blobs) {
    if (b.dtype != "F8_E4M3") continue;
    const auto m = (*c)->Matrix(name);
    if (!m.ok()) return std::string(m.status().message());
  }
  return "";
}

TEST(BlockFp8, BadScalesAndWeightsAreRefusedAtLoad) {
  const std::string w = "model.layers.6.self_attn.kv_a_proj_with_mqa.weight", s = w + "_scale_inv";
  EXPECT_EQ(Fp8Error([](Blobs&) {}), "");
  const auto set_scale = [&](float v) {
    return [&, v](Blobs& b) { std::memcpy(b[s].bytes.data() + 8, &v, 4); };
  };
  EXPECT_THAT(Fp8Error(set_scale(NAN)), AllOf(HasSubstr(s), HasSubstr("scale 2 is nan")));
  EXPECT_THAT(Fp8Error(set_scale(INFINITY)), HasSubstr("inf"));
  EXPECT_THAT(Fp8Error(set_scale(-1.0f)), HasSubstr("-1"));
  EXPECT_EQ(Fp8Error(set_scale(0.0f)), "");  // an all-zero block
  EXPECT_THAT(Fp8Error([&](Blobs& b) { b.erase(s); }), AllOf(HasSubstr(w), HasSubstr("missing")));
  EXPECT_THAT(Fp8Error([&](Blobs& b) {
                b[s].shape = {3, 5};
              }),
              AllOf(HasSubstr(s), HasSubstr("[3, 5]"), HasSubstr("[5, 3]")));
  EXPECT_THAT(Fp8Error([&](Blobs& b) {
                b[w + ".scale"] = b[s];
                b.erase(s);
              }),
              HasSubstr(s));
  for (char nan : {'\x7f', '\xff'}) {
    for (size_t at : {size_t(0), size_t(13), size_t(576 * 384 - 1)}) {
      EXPECT_THAT(Fp8Error([&](Blobs& b) { b[w].bytes[at] = nan; }),
                  AllOf(HasSubstr(w), HasSubstr(fmt::format("element {}", at))));
    }
  }
  EXPECT_EQ(Fp8Error([&](Blobs& b) { b[w].bytes[0] = '\x7e'; }), "");
}

TEST(BlockFp8, DequantisesByBlockWithAHalfBlockAtTheEdge) {
  auto c = Checkpoint::Open(LedgerDir());
  ASSERT_TRUE(c.ok());
  ASSERT_TRUE((*c)->Validate(Config(LedgerDir()), false).ok());
  const std::string name =
      "model.layers.0.self_attn.kv_a_proj_with_mqa.weight";  // [576, 384]: 5 x 3 blocks, the last half
  auto m = (*c)->Matrix(name);
  auto f = (*c)->MatrixF32(name);
  ASSERT_TRUE(m.ok() && f.ok());
  EXPECT_EQ(m->dtype, DType::kF8E4M3);
  for (auto [r, col] : {std::pair{0, 0}, {127, 383}, {128, 128}, {575, 383}, {575, 0}}) {
    const float want =
        E4M3ToF32(static_cast<const uint8_t*>(m->data)[r * 384 + col]) * m->scale[(r / 128) * 3 + col / 128];
    EXPECT_EQ((*f)[size_t(r * 384 + col)], want);
  }
}

TEST(Checkpoint, UnalignedTensorsAreCopiedToAlignment) {
  const std::string dir = Fresh("unaligned");
  Write(dir + "/model.safetensors", ReadAll(DataDir() + "tiny-random/glm-moe-dsa/model.safetensors"), 1);
  auto odd = Checkpoint::Open(dir);
  auto even = Checkpoint::Open(DataDir() + "tiny-random/glm-moe-dsa");
  ASSERT_TRUE(odd.ok() && even.ok());
  ASSERT_TRUE((*odd)->Validate(Config(DataDir() + "tiny-random/glm-moe-dsa"), false).ok());
  auto a = (*odd)->Matrix("lm_head.weight");
  auto b = (*even)->Matrix("lm_head.weight");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->data) % 2, 0u);
  EXPECT_EQ(std::memcmp(a->data, b->data, size_t(a->out * a->in * 2)), 0);
}

TEST(Dummy, FillsTheShapesOfAConfigDeterministically) {
  for (const std::string& dir : {DataDir() + "tiny-random/glm-moe-dsa", LedgerDir()}) {
    const ModelConfig config = Config(dir);
    auto a = Checkpoint::Dummy(config, true, 1), b = Checkpoint::Dummy(config, true, 1),
         c = Checkpoint::Dummy(config, true, 2);
    if (config.num_draft_layers == 0) {
      a = Checkpoint::Dummy(config, false, 1), b = Checkpoint::Dummy(config, false, 1),
      c = Checkpoint::Dummy(config, false, 2);
    }
    ASSERT_TRUE(a.ok() && b.ok() && c.ok());
    ASSERT_TRUE((*a)->Validate(config, config.num_draft_layers > 0).ok())
        << (*a)->Validate(config, config.num_draft_layers > 0);
    EXPECT_EQ((*a)->Identity(config), (*b)->Identity(config));
    EXPECT_NE((*a)->Identity(config), (*c)->Identity(config));
    auto w = (*a)->MatrixF32("model.layers.0.self_attn.o_proj.weight");
    ASSERT_TRUE(w.ok()) << w.status();
    double sum = 0, squares = 0;
    for (float v : *w) sum += v, squares += double(v) * v;
    const double n = double(w->size());
    EXPECT_NEAR(squares / n * double(config.num_heads * config.v_head), 1.0, 0.05);
    EXPECT_NEAR(sum / n, 0.0, 0.01);
  }
}

TEST(Identity, ChangesWithConfigNamesAndBytes) {
  const std::string dir = DataDir() + "tiny-random/deepseek-v3";
  auto c = Checkpoint::Open(dir);
  ASSERT_TRUE(c.ok());
  const ModelConfig config = Config(dir);
  const Digest256 id = (*c)->Identity(config);
  ModelConfig other = config;
  other.merged_json += " ";
  EXPECT_NE((*c)->Identity(other), id);
  Blobs blobs = ReadAll(dir + "/model.safetensors");
  blobs["lm_head.weight"].bytes.back() ^= 1;
  const std::string changed = Fresh("identity");
  Write(changed + "/model.safetensors", blobs);
  EXPECT_NE((*Checkpoint::Open(changed))->Identity(config), id);
  blobs["lm_head.weight"].bytes.back() ^= 1;
  Write(changed + "/model.safetensors", blobs);
  EXPECT_EQ((*Checkpoint::Open(changed))->Identity(config), id);  // the order in the file does not matter
}

TEST(Widening, F16ValuesAreExact) {
  EXPECT_EQ(F16ToF32(0x3c00), 1.0f);
  EXPECT_EQ(F16ToF32(0xc000), -2.0f);
  EXPECT_EQ(F16ToF32(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(F16ToF32(0x7bff), 65504.0f);
  EXPECT_TRUE(std::isinf(F16ToF32(0x7c00)));
  EXPECT_TRUE(std::isnan(F16ToF32(0x7c01)));
}

}  // namespace
}  // namespace sluice
