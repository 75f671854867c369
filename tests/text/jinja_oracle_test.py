#!/usr/bin/env python3
"""Compares Sluice's template language with python3-jinja2, set up as chat templates are rendered by the reference: byte-equal text,
or an error on both sides.

    jinja_oracle_test.py TEXT_PROBE SOURCE_DIR [--rounds N] [--seed S]
"""
import argparse
import glob
import json
import os
import random
import sys
import warnings

import jinja2
import jinja2.ext
import jinja2.sandbox

from probe import Probe


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)
    env.globals["raise_exception"] = raise_exception
    return env


class Comparison:
    def __init__(self, probe):
        self.probe, self.env = probe, environment()
        self.checked = self.failed = self.both_failed = 0

    def check(self, template, variables, must_render=False):
        self.checked += 1
        try:
            want, error = self.env.from_string(template).render(**variables), None
        except Exception as e:  # any failure of the reference counts as one
            want, error = None, e
        got = self.probe.ask(op="render", template=template, variables=variables)
        self.both_failed += want is None and "error" in got
        # The reference raises too, but not where it folds constants.
        if any(x in got.get("error", "") for x in ("cannot be sliced", "is unsafe")):
            return
        if (want is None) == ("error" in got) and (want is None or want == got["text"]) and not (must_render and want is None):
            return
        self.failed += 1
        if self.failed <= 12:
            print(f"differs: {template[:600]!r}\n  with {json.dumps(variables)[:600]}\n  got  {got}\n  want {want!r} {error!r}")


WORDS = ["hello", "", " ", "\n", "a b", "naïve", "日本", "🤗 ok", "<|user|>", "</think>", "it's", 'say "hi"', "back\\slash", "tab\there",
         "x\r\ny", "\u00a0pad\u00a0", "{{ not }}", "<b>&amp;</b>", "ÀÉ ß", "1e5", "-3", " 42 ", "None", "True", "line1\nline2\n", "\x1f\x7f\u2028"]


def random_json(r, depth=0):
    kind = r.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return r.choice(WORDS)
    if kind == 1:
        return r.choice([0, 1, -1, 7, 10**15, 2**63 - 1, -2**63, 2**64 - 1])
    if kind == 2:
        return r.choice([0.0, -0.0, 1.5, 1e16, 1e15, 123456789.125, 1e-5, 0.0001, 1e300, 3.0, 2.5, 0.1 + 0.2])
    if kind == 3:
        return r.choice([True, False, None])
    if kind in (4, 5):
        return r.choice(WORDS) + r.choice(WORDS)
    if kind == 6:
        return [random_json(r, depth + 1) for _ in range(r.randrange(4))]
    return {r.choice(["a", "b", "name", "items", "é", "x y", "city", "n", ""]): random_json(r, depth + 1) for _ in range(r.randrange(4))}


def text(r):
    return "".join(r.choice(WORDS) for _ in range(r.randrange(1, 4)))


def conversation(r):
    messages = []
    if r.random() < 0.5:
        messages.append({"role": "system", "content": text(r)})
    for _ in range(r.randrange(0, 6)):
        messages.append({"role": "user", "content": text(r)})
        if r.random() < 0.8:
            m = {"role": "assistant", "content": r.choice([text(r), "<think>t</think>" + text(r), ""])}
            if r.random() < 0.3:
                m["reasoning_content"] = text(r)
            if r.random() < 0.4:
                calls = r.randrange(1, 3)
                m["tool_calls"] = [{"id": f"c{i}", "type": "function", "function": {
                    "name": r.choice(["get", "get_weather", "ping"]),
                    "arguments": {k: random_json(r) for k in r.sample(["x", "city", "é", "o", "items"], r.randrange(0, 4))}}} for i in range(calls)]
                messages.append(m)
                for i in range(r.randrange(0, calls + 1)):
                    messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": text(r)})
                continue
            messages.append(m)
    return messages or [{"role": "user", "content": text(r)}]


def conversations(c, source, rounds, r):
    templates = [open(p, encoding="utf-8").read() for p in sorted(glob.glob(os.path.join(source, "tests/data/templates/*.jinja")))]
    templates.append(json.load(open(os.path.join(source, "models/ledger-28m-fp8/tokenizer_config.json")))["chat_template"])
    assert len(templates) >= 5
    for template in templates:
        for _ in range(rounds):
            variables = {"messages": conversation(r), "add_generation_prompt": r.random() < 0.5, "tools": None}
            if r.random() < 0.4:
                variables["tools"] = [{"type": "function", "function": {"name": "f", "description": text(r), "parameters": random_json(r)}}
                                      for _ in range(r.randrange(3))]
            if r.random() < 0.4:
                variables["enable_thinking"] = r.random() < 0.5
            c.check(template, variables)


# White space around tags, scoping, and corners that a grammar of random expressions does not reach.
SNIPPETS = r"""
a {%- if true -%} b {%- endif -%} c
---
  {% if true %}
  x
  {% endif %}
y
---
  {%+ if true %}
  x
  {%+ endif +%}
y
---
{{ 1 }}
{{- 2 -}}
  {{ 3 }}

{# c #}
  {# lone comment #}
end {#- c -#} x
---
{% raw %}{{ not }} {% if %}{% endraw %} tail
---
  {%- raw -%}  x  {%- endraw -%}  y
---
{% for a in [1,2,3] %}{% set x = a %}{{ x }}{% endfor %}{{ x is defined }}
---
{% set x = 1 %}{% for a in [1,2] %}{{ x }}{% set x = x + a %}{{ x }}{% endfor %}{{ x }}
---
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}
---
{% set ns = namespace(n=0, l=[]) %}{% for a in 'abc' %}{% set ns.n = ns.n + 1 %}{% set ns.l = ns.l + [a] %}{% endfor %}{{ ns.n }}{{ ns.l }}
---
{% macro f(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}{{ f(b=1, a=2) }}{{ f() }}{{ f(1) | length }}{{ f(1) == '1-2-x;' }}
---
{% macro f(a) %}{{ g(a) }}{% endmacro %}{% macro g(a) %}[{{ a }}{{ outer }}]{% endmacro %}{% set outer = 'o' %}{{ f(1) }}
---
{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
---
{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for k, v in {'x': 1, 'y': [2]}.items() %}{{ k }}={{ v }}{% endfor %}
---
{% for x in [1,2,3,4] if x is even %}{{ loop.index }}/{{ loop.length }}:{{ x }} {{ loop.previtem }} {{ loop.nextitem is defined }}{% else %}none{% endfor %}
---
{% for x in [] %}{% else %}empty{% endfor %}{% for x in undefined_name %}{% else %}nothing{% endfor %}
---
{% for x in [1,2,3,4,5] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}
---
{% for x in [1,2] %}{% for y in [1,2] %}{{ loop.depth }}{{ loop.index }}{{ loop.cycle('a', 'b') }}{% endfor %}{% endfor %}
---
{% for x in [1,1,2] %}{{ loop.changed(x) }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{% endfor %}
---
{% set t %}  block {{ 1 + 1 }}  {% endset %}[{{ t }}]{% set t | trim | upper %}  block  {% endset %}[{{ t }}]
---
{% filter upper | replace('A', 'b') %}abc{% endfilter %}{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}
---
{{ 'a' if false }}|{{ ('a' if false) is defined }}|{{ 'x' if 0 else 'y' if 0 else 'z' }}
---
{{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 1 / 3 }} {{ 6 / 2 }} {{ 2 ** -1 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
---
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ not 1 == 2 }} {{ 1 in [1] }} {{ 1 not in [1] }} {{ 'a' in 'abc' }} {{ 'k' in {'k': 1} }}
---
{{ 'a' ~ 1 ~ none ~ true ~ [1, 'x'] ~ {'a': 1.0} ~ (1,) ~ () }}
---
{{ [1, 'a', "it's", 'q"q', 'b"\'b', none, true, 1.0, {'k': [()]}, 'é\n\t\\', '\x00\x1f\x7f\xa0', '\u200b'] }}
---
{{ 1e16 }} {{ 1e15 }} {{ 1.0 }} {{ 1e-5 }} {{ 0.0001 }} {{ 1.5e300 }} {{ 100000000000000000 }} {{ 0x1F }} {{ 0b11 }} {{ 1_000 }} {{ 0o17 }}
---
{{ x.y }}
---
{{ x.y.z }}
---
{{ d.a.b.c is defined }}
---
{{ 'abc'[1:] }} {{ 'abc'[::-1] }} {{ 'abc'[-1] }} {{ 'abc'[5] }} {{ [1,2,3][-2:] }} {{ [1,2,3][::2] }} {{ [1,2,3].0 }} {{ 'naïve日本'[2:6] }} {{ 'abc'[:-1] }} {{ [1,2,3,4][3:0:-1] }} {{ 'abc'[10:] }}
---
{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ ' a b  c '.rsplit(none, 1) }} {{ ' a b  c '.split(none, 1) }}
---
{{ '  x '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xxa'.lstrip('xy') }}|{{ 'a\n\n'.rstrip('\n') }}
---
{{ 'hello world'.title() }} {{ "they're bill's".title() }} {{ "they're bill's-x (y" | title }} {{ 'hELLO' | capitalize }} {{ 'ß' | upper }} {{ 'ÀÉ' | lower }}
---
{{ 'abcabc'.replace('b', 'xx') }} {{ 'abcabc'.replace('b', '', 1) }} {{ 'abc'.replace('', '-') }} {{ 'abc' | replace('', '-', 2) }} {{ 'abc'.find('c') }} {{ 'abc'.find('z') }} {{ 'äbc'.find('c') }} {{ 'aXbX'.rfind('X') }} {{ 'aaa'.count('a') }} {{ 'a\nb\r\nc'.splitlines() }}
---
{{ 'abc'.startswith('ab') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith('c') }} {{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.py'.removesuffix('.py') }} {{ '-'.join(['a', 'b']) }}
---
{{ 'abc'.isdigit() }} {{ '12'.isdigit() }} {{ 'abc'.isalpha() }} {{ 'ABC'.isupper() }} {{ 'a1'.islower() }} {{ ' '.isspace() }} {{ ''.isspace() }}
---
{{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 2) }} {{ {'a': 1, 'b': 2}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'items': 3}['items'] }} {{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2} | items | list }}
---
{{ [3, 1, 2] | sort }} {{ ['b', 'A', 'c'] | sort }} {{ ['b', 'A'] | sort(case_sensitive=true) }} {{ [1, 2] | sort(reverse=true) }} {{ [1, 1, 2] | unique | list }} {{ ['a', 'A'] | unique | list }} {{ [1, 2] | reverse | list }} {{ 'abc' | reverse }} {{ [1, 2, 3] | sum }} {{ [1, 5, 3] | max }} {{ ['b', 'a'] | min }} {{ [] | max is defined }}
---
{{ [{'n': 2, 'r': 'u'}, {'n': 1, 'r': 'a'}, {'r': 'u'}] | selectattr('r', 'equalto', 'u') | map(attribute='n') | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('>', 1) | list }} {{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ ['x', 'y'] | map('upper') | join('+') }} {{ [{'a': 1}, {}] | map(attribute='a', default=9) | list }} {{ [{'v': 0}, {'v': 1}] | selectattr('v') | list }} {{ [{'n': 2}, {'n': 1}] | sort(attribute='n') }} {{ [{'x': 1}] | rejectattr('y') | list }}
---
{{ x | default('d') }} {{ '' | default('d') }} {{ '' | default('d', true) }} {{ none | default('d') }} {{ none | d('e', boolean=true) }} {{ x.y | default('z') }}
---
{{ '42' | int }} {{ '4.7' | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ 3.9 | int }} {{ ' 12 ' | int }} {{ 'ff' | int(base=16) }} {{ '1.5' | float }} {{ 'x' | float }} {{ true | int }} {{ none | int }} {{ 2.5 | round }} {{ 3.14159 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ 7 | round }} {{ -3 | abs }} {{ -3.5 | abs }}
---
{{ 'a\nb\n\nc' | indent }} {{ 'a\nb' | indent(2, true) }} {{ 'a\n\nb' | indent('>', blank=true) }} {{ 'one two  three' | wordcount }} {{ '%s-%d-%.2f-%5s|%-5s|%05d' | format('a', 3, 1.5, 'x', 'y', -42) }} {{ '%s' % 'x' }} {{ '%s %s' % ('a', 'b') }} {{ '100%%' | format }}
---
{{ '<a href="x">\'&' | e }} {{ [1, 2] | first }} {{ [1, 2] | last }} {{ [] | first is defined }} {{ 'abc' | first }} {{ 'abc' | list }} {{ {'a': 1, 'b': 2} | list }} {{ {'a': 1} | length }} {{ x | length }} {{ x | list }} {{ x | join }} {{ x | upper }}
---
{{ {'a': [1, 'é', none, true, 1.0, 1e100], 'b': {}, 'c': []} | tojson }} {{ {'b': 1, 'a': 'é\u2028🤗'} | tojson(ensure_ascii=true, sort_keys=true) }} {{ {'a': [1, {'b': []}], 'c': {}} | tojson(indent=2) }} {{ {'a': 1, 'b': 2} | tojson(separators=(',', ':')) }} {{ {'a': [1]} | tojson(indent='--') }} {{ '\x01\x7f"\\/' | tojson }}
---
{{ {1: 'a', none: 'b', true: 'c', 1.5: 'd'} | tojson }} {{ {1: 'a', 'x': 2} }} {{ {1: 2}[1] }} {{ {1: 2}[true] }}
---
{{ x is defined }} {{ x is undefined }} {{ none is none }} {{ 'a' is string }} {{ 1 is number }} {{ true is number }} {{ true is integer }} {{ 1 is integer }} {{ 1.0 is float }} {{ true is boolean }} {{ [] is sequence }} {{ {} is mapping }} {{ 'a' is iterable }} {{ 1 is iterable }} {{ x is iterable }} {{ x is sequence }} {{ 'A' is upper }} {{ 'a' is lower }} {{ 4 is divisibleby 2 }} {{ 4 is divisibleby(3) }} {{ 1 is sameas 1 }} {{ 'a' is in ['a'] }} {{ 1 is eq 1 }} {{ 1 is ne(2) }} {{ 1 is lt 2 }} {{ 3 is even }} {{ range is callable }} {{ 1 is not none }} {{ true is true }} {{ 1 is true }} {{ false is false }}
---
{{ range(5) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }} {{ dict(a=1, b='x') }} {{ dict({'a': 1}, b=2) }}
---
{{ 1 + true }} {{ true + true }} {{ 'a' * 3 }} {{ 3 * [1] }} {{ [1] + [2] }} {{ (1,) + (2,) }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ none == false }} {{ x == y }} {{ x == none }}
---
{{ 'a' + 1 }}
---
{{ none + 'a' }}
---
{{ 1 < 'a' }}
---
{{ x + 1 }}
---
{{ 1 // 0 }}
---
{{ [1, 2].append(3) }}
---
{{ {}.update({}) }}
---
{{ raise_exception('no') }}
---
{{ 'a'.nothing() }}
---
{{ nothing() }}
---
{{ 5 | length }}
---
{% for x in 5 %}{% endfor %}
---
{% set a, b = [1, 2] %}{{ a }}{{ b }}{% set (c, d) = 'xy' %}{{ c }}{{ d }}
---
{% set a, b = [1] %}
---
{% set x.y = 1 %}
---
{% set d = {'a': 1} %}{% set d.a = 2 %}{{ d }}
---
{{ "\x41\u00e9\U0001F917\101\q\
joined" }} {{ 'a' 'b' }}
---
{{ {'a': 1}.a }} {{ {'get': 1}.get is callable }}
---
{{ [] | tojson }} {{ x | tojson }}
---
{{ 'x' | nofilter }}
---
{% if x is notest %}{% endif %}
---
{% if true %}
---
{{ (1, 2)[0] }} {{ (1) }} {{ (1,) }} {{ [1, 2,] }} {{ {'a': 1,} }} {{ 1, 2 }}
---
{{ none.x is defined }} {{ (5).x is defined }} {{ none['a'] is defined }} {{ 'abc'['x'] is defined }} {{ {}['x'] is defined }} {{ [][0] is defined }} {{ none | string }} {{ none | trim }} {{ 5 | trim }}
---
{%- set a = [1, [2, {'k': 'v'}]] -%}{{ a[1][1].k }}{{ a[1][1]['k'] }}{{ a.1.1.k }}
---
{{ not none }} {{ not '' }} {{ 1 and 0 }} {{ 0 or 'x' }} {{ '' or [] }} {{ none and x.y }} {{ 1 or x.y }}
---
{{ 'x' is string and 'y' }} {{ 1 is defined and not 2 is none }} {{ x is not defined or y }}
---
line1
{% if false %}
gone
{% endif %}

line2   {% if true %}   inner   {% endif %}
	{% set z = 1 %}
tabbed
---
{% generation %}{% set q = 1 %}g{{ q }}{% endgeneration %}{{ q is defined }}
---
{{ loop is defined }}{% for i in [1] %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}
---
{% macro m(a) %}{% set a = a + 1 %}{{ a }}{% endmacro %}{{ m(1) }}{{ m(1, 2) }}
---
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=1) }}
---
{{ 'é' | length }}{{ '🤗' | length }}{{ 'a' | list | length }}{{ '日本' | first }}{{ '日本' | last }}
---
{{ 0.1 + 0.2 }} {{ 1e308 * 10 }} {{ 5 // 0.3 }} {{ 1.0 % 0.1 }} {{ 3 * 1.5 }}
---
{{ 'a' not in 'abc' }} {{ 1 in 'abc' }}
---
{{ [[1, 2], [3]] | map('first') | list }} {{ [[1, 2], [3]] | map('join', '-') | list }} {{ ['1', '2'] | map('int') | sum }}
---
{{ 'a' if x is defined else 'b' }} {{ [x is defined, 1] }} {{ {'a': x is defined} }} {{ (x is none) | string }}
---
{{ messages[0]['content'][0]['text'] is defined }}
---
{{ '\n' in 'a\nb' }}{{ 'a
b' }}
---
{{ "a" ~ "b" ~ 1 + 2 }} {{ 1 ~ 2 * 3 }} {{ 'a' + 'b' | upper }} {{ -1 | abs }} {{ (-1) | abs }} {{ 2 * 3 | string }}
---
{%- for x in [3,1] -%}
  {{- x -}}
  {%- if not loop.last %}, {% endif -%}
{%- endfor %}.
---
{{ {'a': 1} == {'a': 1.0} }} {{ [1, [2]] == [1, [2]] }} {{ (1,) == [1] }} {{ 'a' != 'b' }} {{ {'a': 1} != {'b': 1} }}
---
{{ x[0] }}
---
{{ 5[0] is defined }} {{ (5)['a'] is defined }}
---
{{ 5[1:] }}
---
{{ 'abc' | map('upper') | list }} {{ {'a': 1} | map('upper') | list }} {{ none | list }}
---
{{ 10 ** 20 }} {{ 2 ** 62 * 2 }} {{ 9007199254740993 }} {{ 9007199254740993.0 }}
---
{% set l = [1,2,3] %}{{ l[1:][0] }}{{ l[:2] | last }}{{ l | length - 1 }}{{ (l | length) - 1 }}
---
{{- '  ' -}} x {{+ 1 }}
""".split("\n---\n")


class Grammar:
    """Random expressions over a few variables, from well-typed to nonsense."""

    def __init__(self, r):
        self.r = r

    def atom(self):
        r = self.r
        return r.choice(["1", "0", "-3", "2.5", "'abc'", "''", "'a b\\n'", "'Ünï'", "none", "true", "false", "s", "t", "n", "l", "d", "e", "missing",
                         "d.a", "d['b']", "l[0]", "l[-1]", "m[0].content", "m[0].role", "[]", "{}", "[1, 's', none]", "{'k': n}", "(1, s)"])

    def expr(self, depth):
        r = self.r
        if depth == 0:
            return self.atom()
        sub = lambda: self.expr(depth - 1 if r.random() < 0.8 else 0)
        kind = r.randrange(14)
        if kind == 0:
            return f"({sub()} {r.choice(['+', '-', '*', '/', '//', '%'])} {sub()})"
        if kind == 1:
            return f"({sub()} ~ {sub()})"
        if kind == 2:
            return f"({sub()} {r.choice(['==', '!=', '<', '>', '<=', '>=', 'in', 'not in'])} {sub()})"
        if kind == 3:
            return f"({sub()} {r.choice(['and', 'or'])} {sub()})"
        if kind == 4:
            return f"(not {sub()})"
        if kind == 5:
            return f"({sub()} if {sub()} else {sub()})"
        if kind == 6:
            return f"({sub()}) | {r.choice(['length', 'trim', 'upper', 'lower', 'title', 'capitalize', 'string', 'list', 'first', 'last', 'int', 'float', 'tojson', 'reverse | list', 'sort', 'unique | list', 'sum', 'max', 'min', 'abs', 'items | list', 'wordcount', 'indent'])}"
        if kind == 7:
            return f"(({sub()}) | {r.choice(['default(s)', 'default(1, true)', 'join', 'join(s)', 'replace(s, t)', 'replace(1, 2)', 'map(attribute=' + repr('a') + ') | list', 'map(' + repr('string') + ') | list', 'select | list', 'reject(' + repr('none') + ') | list', 'selectattr(' + repr('a') + ') | list', 'tojson(indent=1)', 'round(1)', 'dictsort', 'list'])})"
        if kind == 8:
            return f"(({sub()}) is {r.choice(['', 'not '])}{r.choice(['defined', 'undefined', 'none', 'string', 'number', 'integer', 'float', 'boolean', 'mapping', 'sequence', 'iterable', 'true', 'false', 'upper', 'lower', 'even', 'odd'])})"
        if kind == 9:
            return f"({sub()})[{sub()}]"
        if kind == 10:
            return f"({sub()})[{r.choice(['', '1', '-1', '0', 'n'])}:{r.choice(['', '2', '-1', 'n'])}{r.choice(['', ':', ':-1', ':2'])}]"
        if kind == 11:
            return f"({sub()}).{r.choice(['strip()', 'split()', 'split(s)', 'upper()', 'startswith(s)', 'find(s)', 'get(s)', 'get(s, 1)', 'keys() | list', 'values() | list', 'items() | list', 'rstrip(s)', 'splitlines()', 'count(s)', 'a', 'title()', 'join(l)', 'partition(s)', 'rsplit(t, 1)', 'append(1)', 'pop()'])}"
        if kind == 12:
            return f"[{sub()}, {sub()}]"
        return f"{{'x': {sub()}, s: {sub()}}}"

    def template(self):
        r = self.r
        parts = []
        for _ in range(r.randrange(1, 4)):
            e = self.expr(r.randrange(1, 4))
            parts.append(r.choice([f"{{{{ {e} }}}}", f"{{% if {e} %}}yes{{% else %}}no{{% endif %}}", f"{{% set v = {e} %}}{{{{ v }}}}",
                                   f"{{% for i in {e} %}}{{{{ i }}}},{{% endfor %}}", f"{{{{- {e} -}}}} \n"]))
            parts.append(r.choice(["", " ", "\n", " x\n"]))
        return "".join(parts)


# Where a generator's or a method's printed form, a float's or an enormous number's limits would be compared, not the language.
UNFAIR = ("<generator", "<built-in", "<bound method", "dict_items", "dict_keys", "dict_values", "0x7f", "<reversed", "<list_reverse")


def random_expressions(c, rounds, r):
    g = Grammar(r)
    for _ in range(rounds):
        template = g.template()
        variables = {"s": r.choice(WORDS), "t": r.choice(WORDS), "n": r.choice([0, 1, 2, -1, 3]), "l": [random_json(r) for _ in range(r.randrange(1, 4))],
                     "d": {"a": random_json(r), "b": random_json(r)}, "e": r.choice([[], {}, ""]), "m": conversation(r)}
        try:
            want = c.env.from_string(template).render(**variables)
            if any(u in want for u in UNFAIR):
                continue
        except Exception:
            pass
        c.check(template, variables)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("probe")
    parser.add_argument("source")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter('ignore', SyntaxWarning)
    r = random.Random(args.seed)
    c = Comparison(Probe(args.probe))
    for snippet in SNIPPETS:
        c.check(snippet.lstrip("\n") if snippet.startswith("\n") and snippet is SNIPPETS[0] else snippet,
                {"messages": [{"role": "user", "content": "hi"}], "d": {"a": {}}})
    conversations(c, args.source, args.rounds, r)
    random_expressions(c, args.rounds * 20, r)
    print(f"{c.checked} renderings compared, {c.failed} differ ({c.both_failed} fail on both sides)")
    return 1 if c.failed or not c.checked else 0


if __name__ == "__main__":
    sys.exit(main())
