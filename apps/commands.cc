#include "commands.h"

#include <CLI/CLI.hpp>
#include <cctype>
#include <filesystem>
#include <iostream>

#include "config/flags.h"

namespace sluice {
namespace {

std::string UpperCase(std::string text) {
  for (char& c : text) c = char(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// CLI11 writes an option's values as "INT:INT in [1 - 8]", "TEXT:{a,b}", "FLOAT:POSITIVE" or "TEXT".
struct Values {
  std::string metavar, limits;
};
Values ValuesOf(const CLI::Option& option) {
  const std::string text = option.get_type_name();
  const size_t colon = text.find(':');
  const std::string type = text.substr(0, colon), rule = colon == text.npos ? "" : text.substr(colon + 1);
  Values v;
  v.metavar = type == "INT" || type == "UINT" ? "N" : type == "FLOAT" ? "F" : type;
  if (rule.starts_with("{") && rule.ends_with("}")) {
    v.metavar = rule.substr(1, rule.size() - 2);
    for (char& c : v.metavar) c = c == ',' ? '|' : c;
  } else if (const size_t range = rule.find(" in ["); range != rule.npos && rule.ends_with("]")) {
    v.limits = rule.substr(range + 5, rule.size() - range - 6);
    if (const size_t dash = v.limits.find(" - "); dash != v.limits.npos) v.limits.replace(dash, 3, " to ");
  } else {
    v.limits = rule;
  }
  if (option.get_items_expected_max() > 1) v.metavar += "...";
  return v;
}

CommandSyntax SyntaxOf(const CLI::App& app) {
  CommandSyntax syntax;
  syntax.usage = app.get_name();
  syntax.summary = app.get_description();
  for (const CLI::Option* o : app.get_options()) {
    if (o->get_positional()) {
      const std::string name = UpperCase(o->get_name());
      syntax.usage += o->get_required() ? " " + name : " [" + name + "]";
      syntax.summary += "\n" + name + ": " + o->get_description();
      continue;
    }
    if (o == app.get_help_ptr()) continue;
    CommandOption row{.name = "--" + o->get_lnames().front(), .metavar = "", .help = o->get_description()};
    if (o->get_type_size() != 0) {  // else a switch
      const Values values = ValuesOf(*o);
      row.metavar = values.metavar;
      if (!values.limits.empty()) row.help += (row.help.empty() ? "" : "; ") + values.limits;
      std::string now = o->get_default_str();
      if (now.starts_with("[") && now.ends_with("]")) now = now.substr(1, now.size() - 2);
      if (!now.empty()) row.help += (row.help.empty() ? "[" : " [") + now + "]";
    }
    for (size_t i = 1; i < o->get_lnames().size(); ++i)
      row.help +=
          (i == 1 ? " Also: --" : ", --") + o->get_lnames()[i] + (i + 1 == o->get_lnames().size() ? "." : "");
    syntax.options.push_back(std::move(row));
  }
  syntax.usage += " [options]";
  return syntax;
}

Status UnknownWord(const CLI::App& app) {
  const std::string word = app.remaining().front();
  if (word.starts_with("-")) return Invalid("unknown flag {}", word);
  return Invalid("unexpected word '{}'; usage: {}", word, SyntaxOf(app).usage);
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = [] {
    std::vector<Command> present;
    for (const Command& c : kCommandTable) {
      if (c.run != nullptr) present.push_back(c);
    }
    return present;
  }();
  return commands;
}

ExitCode ExitCodeOf(const Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
      return kExitUsage;
    case absl::StatusCode::kInternal:
      return kExitCheckFailed;
    default:
      return kExitEnvironment;
  }
}

// A complaint that begins with the name of a file is about that file: --help knows nothing of it.
static bool AboutAFile(std::string_view message) {
  std::error_code error;
  return std::filesystem::exists(message.substr(0, message.find(": ")), error);
}

int FailWith(std::string_view command, const Status& status) {
  const ExitCode code = ExitCodeOf(status);
  std::cerr << "sluice " << command << ": " << Message(status) << "\n";
  if (code == kExitUsage && !AboutAFile(Message(status)))
    std::cerr << "see: sluice " << command << " --help\n";
  return code;
}

void SayNotices(std::string_view command, const ServerConfig& config) {
  for (const std::string& line : config.notices) std::cerr << "sluice " << command << ": " << line << "\n";
}

static CLI::Validator Amount(bool zero, double most) {
  return {[=](std::string& text) -> std::string {
            const StatusOr<double> value = ParseReal(text);
            if (!value.ok()) return std::string(Message(value.status()));
            if (*value > most) return fmt::format("{} is too large; at most {:.0f}", text, most);
            if (*value < 0 || (*value == 0 && !zero))
              return fmt::format("{} is too small; {}", text, zero ? "at least 0" : "it must be above 0");
            return "";
          },
          fmt::format("{} {:.0f}", zero ? "0 to" : "above 0, at most", most)};
}

CLI::Validator AtLeast0(double most) { return Amount(true, most); }
CLI::Validator Above0(double most) { return Amount(false, most); }

std::optional<int> ParseWords(CLI::App* app, std::string_view command, const std::vector<std::string>& args) {
  std::vector<std::string> reversed(args.rbegin(), args.rend());
  try {
    app->parse(reversed);
  } catch (const CLI::CallForHelp&) {
    std::cout << HelpText(SyntaxOf(*app)) << (app->get_footer().empty() ? "" : "\n" + app->get_footer());
    return kExitOk;
  } catch (const CLI::RequiredError&) {
    if (app->remaining_size() > 0) return FailWith(command, UnknownWord(*app));
    std::string missing;
    for (const CLI::Option* o : app->get_options()) {
      if (!o->get_required() || o->count() > 0) continue;
      missing += missing.empty() ? "" : ", ";
      missing += o->get_positional() ? UpperCase(o->get_name()) : o->get_name();
    }
    return FailWith(command, Invalid("{} is missing; usage: {}", missing, SyntaxOf(*app).usage));
  } catch (const CLI::ExtrasError&) {
    return FailWith(command, UnknownWord(*app));
  } catch (const CLI::ParseError& e) {
    return FailWith(command, Invalid("{}", e.what()));
  }
  return std::nullopt;
}

}  // namespace sluice
