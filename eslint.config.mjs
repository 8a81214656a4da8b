// The pages' scripts are joined into one before they run: what one file declares at its top, the others use.
// So "not defined" and "not used" are checked across all files, with the names of the others as globals.

import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(new URL("./.venv/node/package.json", import.meta.url));
const js = require("@eslint/js");
const globals = require("globals");

const folders = ["src/steelyard/report/assets/", "src/steelyard/view/assets/"];
const scripts = folders.flatMap((folder) => readdirSync(folder).filter((name) => name.endsWith(".js"))
  .map((name) => folder + name));
const texts = new Map(scripts.map((path) => [path, readFileSync(path, "utf8")]));

// The names that a script declares at its top: functions, classes, constants and variables.
function declared(text) {
  const names = [...text.matchAll(/^(?:async )?(?:function|class) (\w+)/gm)].map((found) => found[1]);
  for (const [, list] of text.matchAll(/^(?:const|let) ([^{[].*)$/gm)) {
    for (const part of list.matchAll(/(?:^|, )(\w+) = |^(\w+)/g)) names.push(part[1] || part[2]);
  }
  return names;
}

const names = new Map([...texts].map(([path, text]) => [path, declared(text)]));

// Of one script: the names that the others declare, and those of its own that the others use.
function shared(path) {
  const theirs = [...names].filter(([other]) => other !== path);
  const used = theirs.map(([other]) => texts.get(other)).join("\n");
  return { others: theirs.flatMap(([, list]) => list),
    exported: names.get(path).filter((name) => new RegExp(`\\b${name}\\b`).test(used)) };
}

export default [
  js.configs.recommended,
  ...scripts.map((path) => {
    const { others, exported } = shared(path);
    const own = new Set(names.get(path));
    const known = Object.fromEntries(others.filter((name) => !own.has(name)).map((name) => [name, "readonly"]));
    return {
      files: [path],
      languageOptions: { ecmaVersion: 2023, sourceType: "script",
        globals: { ...globals.browser, ...known, table: "writable", drawer: "writable" } },
      rules: {
        "no-unused-vars": ["error", { args: "after-used", varsIgnorePattern: `^(${exported.join("|") || "-"})$` }],
        "no-redeclare": "off",  // `table` and others are both a global and declared here
        "eqeqeq": "error",
        "no-var": "error",
        "prefer-const": "error",
        "no-eval": "error",
        "no-implied-eval": "error",
        "no-restricted-syntax": ["error", { selector: "MemberExpression[property.name=/^(innerHTML|outerHTML|insertAdjacentHTML)$/]",
          message: "Text enters a page through dom.js, as text." }],
      },
    };
  }),
];
