// Any text as a schema, a pattern or a grammar: refused with a message, or a constraint that always has a way
// on and ends.
#include <bit>
#include <string>

#include "base/check.h"
#include "base/random.h"
#include "grammar/constraint.h"
#include "grammar/test_vocabulary.h"

extern const char* const kFuzzWords[] = {"root ::= ",
                                         "\n",
                                         "::=",
                                         "\"ab\"",
                                         "[a-z]",
                                         "[^\"]",
                                         "(",
                                         ")",
                                         "|",
                                         "*",
                                         "+",
                                         "?",
                                         "{2,3}",
                                         "\\d",
                                         "\\w",
                                         ".",
                                         "^",
                                         "$",
                                         "a",
                                         "é",
                                         "{",
                                         "}",
                                         "{\"type\":\"object\",\"properties\":{",
                                         "\"a\":",
                                         "{\"type\":\"string\"}",
                                         "{\"type\":\"integer\",\"minimum\":3}",
                                         "},\"required\":[\"a\"]}",
                                         "\"$ref\":\"#\"",
                                         "\"anyOf\":[",
                                         "]",
                                         ",",
                                         "{\"enum\":[1,\"x\"]}",
                                         "\"maxLength\":3",
                                         "\"pattern\":\"a|b\"",
                                         "\"items\":",
                                         "true",
                                         "false"};
extern const size_t kFuzzWordCount = std::size(kFuzzWords);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sluice;
  static const auto vocabulary = std::make_shared<TestVocabulary>();
  static ConstraintCompiler compiler(vocabulary, {vocabulary->end()});
  if (size < 1) return 0;
  ConstraintRequest request;
  request.kind = ConstraintRequest::Kind(data[0] % 4);
  request.whitespace = (data[0] & 16) != 0;
  request.text.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
  auto made = compiler.Compile(request);
  if (!made.ok()) {
    SLUICE_CHECK(!made.status().message().empty(), "a refusal without a reason");
    return 0;
  }
  SeededStream random(size * 31 + data[0]);
  int32_t left = 200;
  auto state = (*made)->Start({}, left);
  for (;;) {
    const auto mask = state->Mask(left);
    int64_t allowed = 0;
    for (const uint64_t word : mask) allowed += std::popcount(word);
    SLUICE_CHECK(allowed > 0, "no way on with {} tokens left", left);
    std::vector<int32_t> forced;
    state->Forced(1, &forced);
    if (!forced.empty()) {
      SLUICE_CHECK(allowed == 1 && ((mask[size_t(forced[0]) / 64] >> (forced[0] % 64)) & 1) != 0,
                   "token {} is forced among {}", forced[0], allowed);
    }
    int64_t pick = int64_t(random.Below(uint64_t(allowed)));
    int32_t token = 0;
    while (((mask[size_t(token) / 64] >> (token % 64)) & 1) == 0 || pick-- > 0) ++token;
    if (token == vocabulary->end()) return 0;
    if (--left == 0) return 0;  // longer than the room: its shortest text was
    state->Accept(token, left);
  }
}
