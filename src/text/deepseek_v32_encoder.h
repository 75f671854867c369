// DeepSeek-V3.2's prompt form. The release has no Jinja template: turns, reasoning and tool calls (DSML) are
// put together by rules.
#pragma once

#include <memory>

#include "text/chat_template.h"

namespace sluice {

// Render's kwargs:
//   thinking or enable_thinking: bool, default false. The last assistant turn thinks; reasoning of earlier
//   turns is dropped. tools: OpenAI form; shown in the first system or developer message (one is made when
//   there is none). response_format: a JSON schema that the same message asks the answer to follow.
// Tool results follow their assistant message in the order of its calls; results that name another call's
// tool_call_id are put into that order. Invalid: a result without an open call, too few results before the
// next turn, an empty developer message.
std::shared_ptr<const ChatTemplate> MakeDeepseekV32Encoder();

}  // namespace sluice
