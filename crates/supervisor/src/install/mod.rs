//! Installs the dependencies of a checkout as `detect` decides, and reports each command as an
//! event. A failed command ends a build; a session starts all the same.

mod config;
mod detect;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use harvest_proto::{
    EventBody,
    bridge::{Checkout, Exit},
    json, redact,
};

use self::detect::{Project, Purpose};
pub(crate) use self::{
    config::{CONFIG_FILE, MAX_CONFIG_BYTES, parse as parse_config},
    detect::InstallCommand,
};
use crate::{
    capture::{self, describe},
    files,
    outbox::Outbox,
    sandbox::Sandbox,
    users::User,
};

// A larger file of a project is no description of it. The number of values bounds the memory of
// parsing.
const MAX_FILE_BYTES: usize = 256 * 1024;
const MAX_JSON_NODES: usize = 20_000;
// Folders of a checkout that are looked at: a repository with more is not searched further.
const MAX_FOLDERS: usize = 200;

/// Folders whose projects belong to other projects, or to none.
const SKIPPED: [&str; 14] = [
    "node_modules",
    "vendor",
    "third_party",
    "target",
    "venv",
    "dist",
    "build",
    "docs",
    "doc",
    "examples",
    "example",
    "fixtures",
    "test",
    "tests",
];

/// The projects of a checkout, with the access of this user.
pub(crate) struct Projects(Vec<Project>);

impl Projects {
    pub(crate) fn read(sandbox: &Sandbox, checkout: &Checkout, user: &User) -> Self {
        let root = format!("{}/{}", sandbox.workspace(), checkout.folder);
        let mut projects = vec![read_project(Path::new(&root), String::new(), user)];
        for name in folders(Path::new(&root)) {
            projects.push(read_project(&Path::new(&root).join(&name), name, user));
        }
        projects.retain(|project| !project.files.is_empty());
        Self(projects)
    }

    /// The versions of languages that they ask for, by folder.
    pub(crate) fn pins(&self) -> Vec<(String, String)> {
        detect::pins(&self.0)
    }

    /// The commands that prepare them. Debian packages come first.
    pub(crate) fn commands(&self, packages: &[String], building: bool) -> Vec<InstallCommand> {
        let mut commands: Vec<_> = detect::packages(packages).into_iter().collect();
        commands.extend(detect::commands(&self.0, building));
        commands
    }

    /// The commands that remain when no dependency has moved since an earlier build.
    pub(crate) fn build_commands(&self) -> Vec<InstallCommand> {
        let mut commands = detect::commands(&self.0, true);
        commands.retain(|command| command.purpose == Purpose::Build);
        commands
    }
}

/// Patterns of git for the files that decide what is installed.
pub(crate) fn path_patterns() -> Vec<String> {
    let patterns = |name: &&str| [(*name).to_owned(), format!(":(glob)*/{name}")];
    detect::NAMES.iter().flat_map(patterns).collect()
}

/// The folders of a checkout that may contain projects.
fn folders(root: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let entries = entries.flatten().filter(|entry| {
        // A link may lead out of the checkout.
        entry.file_type().is_ok_and(|kind| kind.is_dir())
    });
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names
        .filter(|name| !name.starts_with('.') && !SKIPPED.contains(&name.as_str()))
        .take(MAX_FOLDERS)
        .collect();
    names.sort();
    names
}

fn read_project(folder: &Path, name: String, user: &User) -> Project {
    let mut project = Project { folder: name, ..Project::default() };
    for file in detect::NAMES {
        let path = folder.join(file);
        if !fs::symlink_metadata(&path).is_ok_and(|about| about.is_file()) {
            continue;
        }
        let read = detect::READ.contains(&file).then(|| files::read_small(&path, user));
        let text = read.and_then(|read| read.ok().flatten()).unwrap_or_default();
        let fits =
            text.len() <= MAX_FILE_BYTES && json::count_nodes(text.as_bytes()) <= MAX_JSON_NODES;
        project.files.insert(file.to_owned(), if fits { text } else { String::new() });
    }
    project
}

/// Runs the commands of a checkout. The error names the first required command that failed.
pub(crate) async fn run(
    (sandbox, outbox): (&Sandbox, &Outbox),
    checkout: &Checkout,
    commands: Vec<InstallCommand>,
    (user, root): (&User, &User),
    timeout: Duration,
) -> Result<(), String> {
    let workspace = sandbox.workspace();
    for command in commands {
        let folder = match command.folder.is_empty() {
            true => checkout.folder.to_string(),
            false => format!("{}/{}", checkout.folder, command.folder),
        };
        let runs_as = if command.as_root { root } else { user };
        let cwd = format!("{workspace}/{folder}");
        let started = Instant::now();
        let spec = sandbox.process_spec(command.argv.clone(), runs_as, &cwd);
        let (failure, tail) = match capture::run(sandbox, spec, timeout).await {
            Ok(captured) if captured.exit == Exit::Code(0) => (None, captured.tail),
            Ok(captured) => (Some(describe(captured.exit)), captured.tail),
            Err(fault) => (Some("cannot start".to_owned()), fault.message),
        };
        let tail = redact::redact(&tail);
        outbox.push(
            None,
            EventBody::InstallStep {
                folder: folder.clone(),
                manager: command.manager.to_owned(),
                command: command.title.clone(),
                millis: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
                failure: failure.clone(),
                tail,
            },
        );
        if let Some(failure) = failure.filter(|_| command.required) {
            return Err(format!("`{}` in {folder} {failure}", command.title));
        }
    }
    Ok(())
}
