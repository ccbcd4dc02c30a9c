//! The page of the base image, from its recipe.

use std::path::Path;

use harvest_images::{Base, Recipe, RecipeStep};

use super::REGENERATE;

const RECIPE: &str = include_str!("../../../../images/base.toml");

/// The part that no recipe says.
const CHANGING: &str = "
## Changing it

- A tool for one repository: `.harvest/setup.sh` installs it for the user `harvest`, once per build.
- A tool for your sandboxes: a recipe of your own `from = \"agents\"`, built with
  `harvest image build FILE` and chosen with `harvest repo set NAME --image IMAGE`, or for everything
  with the setting `image` ([guide](../images.md)).
- A tool for everyone: `images/base.toml`. Debian's packages are in `include`, programs from npm and
  PyPI have a fixed version and a hash. The last step starts each tool, so that one that is missing
  fails the build. `base_image_stays_below_800_megabytes` limits the size.

Each step is a layer, and an unchanged step comes from the cache: what changes often comes last.
`harvest image build base --force` runs every step again, with Debian's packages of today, and
`harvest image build agents` then builds on the new one. Running sandboxes and snapshots keep
the layers they started from.
";

pub(super) fn page() -> String {
    let recipe = Recipe::parse(RECIPE, Path::new(".")).unwrap();
    let Base::Debian { suite, include } = recipe.from else { panic!("the base is a Debian") };
    let mut page = format!(
        "# The base image\n\nGenerated from `images/base.toml` by `{REGENERATE}`.\n\n\
         All images are built on it: Debian `{suite}` with the tools that agents need. `claude` adds\n\
         Claude Code, `agents` OpenCode and Codex, `full` a browser and more.\n\n\
         ## Tools\n\nThe last step of the recipe starts each of them:\n\n{}\n\
         ## Debian packages\n\n{}",
        list(&tools(&recipe.steps)),
        list(&include.iter().map(String::as_str).collect::<Vec<_>>()),
    );
    page += "\n## Environment of commands\n\n| what | value |\n|---|---|\n";
    for step in &recipe.steps {
        match step {
            RecipeStep::Env(variables) => {
                for (name, value) in variables {
                    page += &format!("| `{name}` | `{value}` |\n");
                }
            }
            RecipeStep::User(user) => page += &format!("| user | `{user}` |\n"),
            RecipeStep::Workdir(folder) => page += &format!("| working folder | `{folder}` |\n"),
            _ => {}
        }
    }
    page + CHANGING
}

/// The programs that the last step starts.
fn tools(steps: &[RecipeStep]) -> Vec<&str> {
    let Some(RecipeStep::Run(script)) = steps.last() else { panic!("the last step is a script") };
    let loop_of = script.lines().find_map(|line| line.trim().strip_prefix("for tool in "));
    loop_of.and_then(|line| line.strip_suffix("; do")).expect("it names tools").split(' ').collect()
}

/// Words in backticks, wrapped at 100 columns.
fn list(words: &[&str]) -> String {
    let mut lines = vec![String::new()];
    for (index, word) in words.iter().enumerate() {
        let word = format!("`{word}`{}", if index + 1 < words.len() { "," } else { "" });
        let last = lines.last_mut().expect("one is there");
        if last.is_empty() {
            *last = word;
        } else if last.len() + 1 + word.len() <= 100 {
            *last += &format!(" {word}");
        } else {
            lines.push(word);
        }
    }
    lines.join("\n") + "\n"
}
