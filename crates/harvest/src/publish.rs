//! Copies a folder to the local forge and registers it, for work without a git host. The folder
//! itself is only read.

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use harvest_forge::{ForgeError, ImportedFolder, LocalForge};
use harvest_proto::{
    BranchName, RepositoryName, RepositoryRef, Secret,
    api::{AddRepository, Me, Repository},
    bridge::Author,
    repository_name::LOCAL_OWNER,
};

use crate::{
    Invocation,
    cli::units,
    client::{self, Client},
    confirm, identity,
    printer::{Advice, Printer},
    server_process,
};

// A registration holds the forge's lock while it copies a folder.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct Published {
    pub(crate) repository: Repository,
    /// The branch that is checked out in the folder.
    pub(crate) branch: BranchName,
    /// Whether the folder was not registered before.
    pub(crate) new: bool,
}

/// A folder to publish.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) naming: NameConflict,
    /// Copy the files of a folder without git, unasked.
    pub(crate) all: bool,
}

/// How to handle a name that another repository has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameConflict {
    Refuse,
    /// Append a number.
    AddNumber,
}

/// The local forge of the server on this machine.
pub(crate) fn forge(ctx: &Invocation) -> Result<LocalForge> {
    let server =
        client::local(&ctx.config).context("a folder needs a server on the same machine")?;
    Ok(LocalForge::open(ctx.config.home.join("forge"), &format!("{}/forge", server.url))?)
}

/// Copies `folder` to the forge and registers it. A folder that is registered already is updated.
pub(crate) async fn publish(
    print: Printer,
    client: &Client,
    forge: &LocalForge,
    source: Source<'_>,
    add: AddRepository,
) -> Result<Published> {
    let Source { folder, naming, .. } = source;
    let folder =
        folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?;
    let known = client.repositories().await?;
    if let Some(before) = known.iter().find(|known| is_copy(forge, known, &folder, &add)) {
        return update(print, client, forge, (before, &folder), &add).await;
    }
    chosen_name(&folder, naming, add.name.as_ref(), &known)?;
    let source = Source { folder: &folder, ..source };
    // Asked before anything is locked: the user may not answer for hours.
    let asked = consent(print, forge, source).await?;
    // Locked from the choice of the name to the registration: two concurrent registrations of the
    // same folder would overwrite each other's access token.
    let _lock = hold(print, forge).await?;
    let known = client.repositories().await?;
    if let Some(before) = known.iter().find(|known| is_copy(forge, known, &folder, &add)) {
        return update(print, client, forge, (before, &folder), &add).await;
    }
    let name = chosen_name(&folder, naming, add.name.as_ref(), &known)?;
    let (token, taken) = copy(client, forge, name.name(), &folder).await?;
    let secret = secret_name(&name, &known);
    let path = format!("/v1/secrets/{secret}");
    client.secret_set(&path, &serde_json::json!({ "value": token.expose() })).await?;
    // The question has shown the notes.
    tell(print, &name, if asked { &[] } else { &taken.notes });
    let request = AddRepository {
        url: forge.url(name.name()),
        name: Some(name.into()),
        base: add.base.or_else(|| Some(taken.branch.clone())),
        secret: Some(secret),
        image: add.image,
    };
    let repository =
        client.repository_add(&request).await.context("cannot register the repository")?;
    Ok(Published { repository, branch: taken.branch, new: true })
}

/// Updates the copy of a registered folder.
async fn update(
    print: Printer,
    client: &Client,
    forge: &LocalForge,
    (before, folder): (&Repository, &Path),
    add: &AddRepository,
) -> Result<Published> {
    if add.base.is_some() || add.image.is_some() {
        let message = format!("the folder is already registered as {}", before.name);
        let hint = format!("`harvest repo set {}` changes its base and image", before.name);
        bail!(Advice::new(message, hint));
    }
    let copy = forge.repository_name(&before.url).context("the copy is not on the local forge")?;
    let ImportedFolder { branch, notes, .. } = take(client, forge, copy.name(), folder).await?;
    tell(print, &before.name, &notes);
    Ok(Published { repository: before.clone(), branch, new: false })
}

/// Copies a registered folder again, so that its newest commit is built. Does nothing for other
/// repositories, and for folders that are not there: the server may be on another machine.
pub(crate) async fn refresh(
    ctx: &Invocation,
    client: &Client,
    repository: &Repository,
) -> Result<()> {
    if !repository.url.starts_with(&format!("{}/forge/", client.url())) {
        return Ok(());
    }
    let Ok(forge) = forge(ctx) else { return Ok(()) };
    let copy = forge.repository_name(&repository.url);
    let folder = copy.and_then(|copy| forge.source_folder(copy.name()));
    match folder.filter(|folder| folder.is_dir()) {
        Some(folder) => {
            let add = AddRepository::default();
            update(ctx.print, client, &forge, (repository, &folder), &add).await.map(drop)
        }
        None => Ok(()),
    }
}

/// Whether one of these repositories is a copy of the folder.
pub(crate) fn is_published(ctx: &Invocation, folder: &Path, known: &[Repository]) -> bool {
    let (Ok(forge), Ok(folder)) = (forge(ctx), folder.canonicalize()) else { return false };
    let source = |one: &Repository| forge.source_folder(forge.repository_name(&one.url)?.name());
    known.iter().filter_map(source).any(|source| source == folder)
}

/// Waits for the forge's registration lock.
async fn hold(print: Printer, forge: &LocalForge) -> Result<std::fs::File> {
    let mut waits = false;
    loop {
        if let Some(held) = forge.try_lock().context("cannot lock the local forge")? {
            return Ok(held);
        }
        if !std::mem::replace(&mut waits, true) {
            print.note("Waiting for another folder that is being registered");
        }
        tokio::time::sleep(LOCK_POLL_INTERVAL).await;
    }
}

/// Whether `known` is the copy of this folder and no other name was requested.
fn is_copy(forge: &LocalForge, known: &Repository, folder: &Path, add: &AddRepository) -> bool {
    let same_name = add.name.as_ref().is_none_or(|name| name.matches(&known.name));
    let copy = forge.repository_name(&known.url);
    let source = copy.and_then(|copy| forge.source_folder(copy.name()));
    same_name && source.as_deref() == Some(folder)
}

/// Creates a repository on the forge from the folder.
async fn copy(
    client: &Client,
    forge: &LocalForge,
    name: &str,
    folder: &Path,
) -> Result<(Secret<String>, ImportedFolder)> {
    let token = Secret::new(server_process::random_token());
    let made = forge.create(name, &token).await;
    let made = match made {
        // Left behind by an earlier attempt.
        Err(ForgeError::Exists { .. }) => forge.set_token(name, &token).map(|()| false),
        other => other.map(|_| true),
    };
    let made = made.context("cannot create a repository on the local forge")?;
    match take(client, forge, name, folder).await {
        Ok(taken) => Ok((token, taken)),
        Err(error) => {
            if made {
                // The new repository is not registered yet.
                let _ = forge.remove(name);
            }
            Err(error)
        }
    }
}

/// Asks on a terminal whether to copy a folder that is not a git repository; elsewhere `--all` has
/// to be given. Returns whether it asked.
async fn consent(
    print: Printer,
    forge: &LocalForge,
    Source { folder, all, .. }: Source<'_>,
) -> Result<bool> {
    let summary = if all { None } else { forge.folder_summary(folder).await? };
    let Some(summary) = summary else { return Ok(false) };
    let files = match summary.files {
        1 => "1 file".to_owned(),
        files => format!("{files} files"),
    };
    let what = format!(
        "{} is not a git repository: {files} ({}) would be copied",
        folder.display(),
        units::bytes(summary.bytes)
    );
    let hint = "`--all` copies them; `git init` and a commit choose which";
    if !confirm::can_ask() {
        bail!(Advice::usage(what, hint));
    }
    for note in &summary.notes {
        print.warn(note);
    }
    match confirm::ask(print, &format!("{what}. Copy them?"))? {
        true => Ok(true),
        false => bail!(Advice::new(format!("{} was not copied", folder.display()), hint)),
    }
}

async fn take(
    client: &Client,
    forge: &LocalForge,
    name: &str,
    folder: &Path,
) -> Result<ImportedFolder> {
    let me: Me = client.get("/v1/me").await?;
    let author = Some(me.user).filter(Author::is_known).or_else(identity::of_git);
    tokio::select! {
        taken = forge.import_folder(name, folder, author.as_ref()) => Ok(taken?),
        _ = tokio::signal::ctrl_c() => bail!("interrupted while copying {}", folder.display()),
    }
}

fn tell(print: Printer, name: &str, notes: &[String]) {
    for note in notes {
        print.warn(format!("{name}: {note}"));
    }
}

/// The name for a new repository of the folder.
fn chosen_name(
    folder: &Path,
    naming: NameConflict,
    chosen: Option<&RepositoryRef>,
    known: &[Repository],
) -> Result<RepositoryName> {
    let name = match chosen {
        Some(name) => local_name(name)?,
        None => RepositoryName::local(&free_name(&folder_name(folder), naming, known))?,
    };
    if known.iter().any(|known| known.name == name) {
        bail!(Advice::new(
            format!("the repository `{name}` already exists"),
            "choose another name with --name"
        ));
    }
    Ok(name)
}

/// The name that a user chose for a folder.
fn local_name(chosen: &RepositoryRef) -> Result<RepositoryName> {
    if chosen.owner().is_some_and(|owner| owner != LOCAL_OWNER) {
        bail!(Advice::new(
            format!("the owner of a folder is `{LOCAL_OWNER}`"),
            format!("leave it out: `--name {}`", chosen.name())
        ));
    }
    Ok(RepositoryName::local(chosen.name())?)
}

/// The folder's name, reduced to the characters of a repository name.
fn folder_name(folder: &Path) -> String {
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let name =
        folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String =
        name.chars().map(|letter| if is_allowed(letter) { letter } else { '-' }).take(90).collect();
    let name = name.trim_matches(['-', '.']).trim_end_matches(".git");
    if name.is_empty() { "folder".to_owned() } else { name.to_owned() }
}

fn free_name(name: &str, naming: NameConflict, known: &[Repository]) -> String {
    let is_taken = |name: &str| {
        let mut local = known.iter().filter(|known| known.name.owner() == LOCAL_OWNER);
        local.any(|known| known.name.name() == name)
    };
    first_free(name, '-', |name| naming != NameConflict::Refuse && is_taken(name))
}

/// The name, with a number if it is taken.
fn first_free(name: &str, separator: char, is_taken: impl Fn(&str) -> bool) -> String {
    let numbered = (2..).map(|number| format!("{name}{separator}{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(|name| !is_taken(name)).expect("there are more numbers than repositories")
}

/// The secret's name of a repository. Different repository names can give the same secret name,
/// which would overwrite the first secret: the second one gets a number.
fn secret_name(repository: &RepositoryName, known: &[Repository]) -> String {
    let letter = |letter: char| {
        if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' }
    };
    let name = format!("FORGE_{}", repository.name().chars().map(letter).collect::<String>());
    first_free(&name, '_', |name| {
        known.iter().any(|known| known.name != *repository && known.secret.as_deref() == Some(name))
    })
}

/// The git repository around `folder`, if this user owns it: a repository of another user further
/// up is not meant.
pub(crate) fn enclosing(folder: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let ours = rustix::process::geteuid().as_raw();
    let sudo = crate::config::process_env("SUDO_UID").and_then(|uid| uid.parse().ok());
    let found = folder.ancestors().find(|folder| folder.join(".git").exists())?;
    let owner = std::fs::symlink_metadata(found.join(".git")).ok()?.uid();
    (owner == ours || Some(owner) == sudo).then(|| found.to_owned())
}

/// Runs git and returns its output.
pub(crate) fn git(folder: &Path, args: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.arg("-C").arg(folder).args(args).stdin(Stdio::null()).env("GIT_TERMINAL_PROMPT", "0");
    // Its own process group: Ctrl-C reaches only this process, and git does not report a failure.
    command.process_group(0);
    let output = command.output().context("cannot run git")?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("git {} failed: {}", args.join(" "), message.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_name_is_valid_for_the_vault() {
        let name = RepositoryName::local("next.js-app").unwrap();
        assert_eq!(secret_name(&name, &[]), "FORGE_NEXT_JS_APP");
    }

    #[test]
    fn repositories_never_share_a_secret() {
        let mut known = Vec::new();
        for name in ["local/my-app", "local/my_app", "acme/my-app", "local/my-app-2"] {
            let secret = secret_name(&name.parse().unwrap(), &known);
            assert!(
                known.iter().all(|one: &Repository| one.secret.as_ref() != Some(&secret)),
                "{secret}"
            );
            known.push(Repository { secret: Some(secret), ..repository(name) });
        }
        assert_eq!(known[1].secret.as_deref(), Some("FORGE_MY_APP_2"));
        assert_eq!(
            secret_name(&known[0].name, &known),
            "FORGE_MY_APP",
            "a repository keeps its own secret"
        );
    }

    fn repository(name: &str) -> Repository {
        Repository {
            name: name.parse().unwrap(),
            url: String::new(),
            base: None,
            secret: None,
            image: None,
            build: None,
            created_at: harvest_proto::Timestamp::from_millis(0),
        }
    }

    #[test]
    fn folder_names_become_repository_names() {
        for (folder, name) in [
            ("/a/next.js", "next.js"),
            ("/My Project!", "My-Project"),
            ("/", "folder"),
            ("/x/.git", "git"),
            ("/b.git", "b"),
        ] {
            assert_eq!(folder_name(Path::new(folder)), name);
        }
    }

    #[test]
    fn taken_name_gets_a_number() {
        let known = ["local/app", "local/app-2", "acme/lib"].map(repository);
        assert_eq!(free_name("app", NameConflict::AddNumber, &known), "app-3");
        assert_eq!(free_name("lib", NameConflict::AddNumber, &known), "lib");
        assert_eq!(free_name("app", NameConflict::Refuse, &known), "app");
    }

    #[test]
    fn chosen_owner_of_a_folder_must_be_local() {
        for chosen in ["app", "local/app"] {
            assert_eq!(local_name(&chosen.parse().unwrap()).unwrap(), "local/app");
        }
        assert!(local_name(&"acme/app".parse().unwrap()).is_err());
    }

    #[test]
    fn enclosing_repository_must_be_owned_by_user() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        assert_eq!(enclosing(&inner), None);
        std::fs::create_dir(folder.path().join(".git")).unwrap();
        assert_eq!(enclosing(&inner).as_deref(), Some(folder.path()));
        rustix::fs::chown(folder.path().join(".git"), Some(rustix::fs::Uid::from_raw(12345)), None)
            .unwrap();
        assert_eq!(enclosing(&inner), None, "another user owns it");
    }

    #[test]
    fn git_error_contains_its_message() {
        let folder = tempfile::tempdir().unwrap();
        let error = git(folder.path(), &["symbolic-ref", "HEAD"]).unwrap_err();
        assert!(error.to_string().contains("not a git repository"), "{error}");
    }
}
