//! Makes a backup of a home that may be in use. The file gets its name when it is complete: a kill
//! or a full disk leaves no half backup.
//!
//! The order keeps the parts consistent. No layer is removed meanwhile; the snapshots are listed
//! before and after the database is copied, so that those it refers to are in the archive; forge
//! and artifacts come after the database, which names only what they already have; the objects of
//! git are listed after its references were read.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Context, Result, bail};
use harvest_engine::DiskBackup;
use harvest_images::PackError;
use harvest_proto::Timestamp;
use serde::Serialize;

use super::{
    ABOUT, About, FILES, FOLDERS, FORMAT, IMAGE_LAYERS, LAYERS, SETTINGS, SNAPSHOTS, draft::Draft,
};
use crate::{
    Invocation,
    config::{self, process_env},
    database,
    printer::{Advice, count},
    server_process,
};

/// The optional parts that a backup includes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) snapshots: bool,
    pub(crate) images: bool,
}

/// A complete backup.
#[derive(Debug, Serialize)]
pub(crate) struct Created {
    pub(crate) file: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
    #[serde(flatten)]
    pub(crate) about: About,
    /// Sandboxes of sessions that ran: what they wrote since their last snapshot is not saved.
    pub(crate) running: usize,
    /// Layers that snapshots refer to and that are gone.
    pub(crate) missing_layers: usize,
    /// Sockets, and names and attributes too long for a tar.
    pub(crate) left_out: u64,
}

/// `harvest-2026-01-31T235959Z.tar.gz`.
pub(crate) fn default_name(now: Timestamp) -> PathBuf {
    let time = now.to_string();
    let seconds = time.split('.').next().unwrap_or_default().replace(':', "");
    format!("harvest-{seconds}Z.tar.gz").into()
}

pub(crate) async fn create(ctx: &Invocation, file: &Path, parts: Parts) -> Result<Created> {
    let config = &ctx.config;
    let database = database::file(config)?;
    if file.exists() {
        let hint = "name another file, or remove this one";
        bail!(Advice::new(format!("{} exists already", file.display()), hint));
    }
    let engine = server_process::open_engine(config)?;
    let running = engine.running_session_sandboxes().context("cannot list the sandboxes")?;
    let mut disks = engine.disk_backup().context("cannot lock the disks")?;
    if parts.snapshots {
        disks.read_snapshots().context("cannot list the snapshots")?;
    }
    ctx.print.live("Copying the database", None);
    let draft = Draft::create(file)?;
    let schema = harvest_store::copy_database(&database, &draft.database)
        .await
        .with_context(|| format!("cannot copy {}", database.display()))?;
    if parts.snapshots {
        disks.read_snapshots().context("cannot list the snapshots")?;
    }
    let (mut layers, missing) = disks.layers();
    layers.retain(|layer| parts.images || !layer.of_image);
    let records = disks.snapshot_files().context("cannot read the snapshots")?;
    let about = About {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        schema,
        created_at: SystemTime::now().into(),
        home: config.home.display().to_string(),
        snapshots: records.len(),
        layers: layers.len(),
    };
    let mut archive = draft.archive(ctx.print)?;
    archive.add_bytes(ABOUT, &serde_json::to_vec(&about)?)?;
    archive.add_file(database::OWN_FILE, &draft.database)?;
    if let Some(settings) = config::existing_file(&ctx.flags, &process_env) {
        // The archive follows no symlink, and the settings may be one.
        let target = settings.canonicalize();
        let target = target.with_context(|| format!("cannot find {}", settings.display()))?;
        archive.add_file(SETTINGS, &target)?;
    }
    for name in FILES {
        archive.add_file(name, &config.home.join(name))?;
    }
    for name in FOLDERS {
        add_files(&config.home.join(name), &mut |path| {
            let member = format!("{name}/{path}");
            match path.ends_with('/') {
                true => archive.add_folder(member.trim_end_matches('/'))?,
                false => archive.add_file(&member, &config.home.join(&member)).map(drop)?,
            }
            Ok(())
        })?;
    }
    for (name, record) in &records {
        archive.add_bytes(&format!("{SNAPSHOTS}/{name}"), record)?;
    }
    for layer in &layers {
        let folder = if layer.of_image { IMAGE_LAYERS } else { LAYERS };
        archive.add_tree(&format!("{folder}/{}", layer.id.as_str()), &layer.path)?;
    }
    let left_out = archive.left_out();
    let (bytes, sha256) = draft.finish(archive, file)?;
    ctx.print.end_live();
    drop::<DiskBackup<'_>>(disks);
    let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let missing_layers = missing.len();
    Ok(Created { file, bytes, sha256, about, running, missing_layers, left_out })
}

/// Passes the paths of everything below a folder to `add`, those of folders with a `/` at the end.
/// Git's objects are listed after the rest was added: the references that were read before, also
/// those of a push meanwhile, point to objects that are there.
fn add_files(folder: &Path, add: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let mut objects = Vec::new();
    for path in files_of(folder, vec![String::new()], &mut objects)? {
        add(&path)?;
    }
    for path in files_of(folder, objects, &mut Vec::new())? {
        add(&path)?;
    }
    Ok(())
}

/// The sorted paths of everything in these folders below `root`, without the content of git's
/// folders of objects, whose paths are added to `objects`.
fn files_of(
    root: &Path,
    mut folders: Vec<String>,
    objects: &mut Vec<String>,
) -> Result<Vec<String>> {
    let mut files = Vec::new();
    while let Some(below) = folders.pop() {
        let path = root.join(&below);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.with_context(|| format!("cannot list {}", path.display()))?,
        };
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", path.display()))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if below.is_empty() { name } else { format!("{below}/{name}") };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => {
                    files.push(format!("{path}/"));
                    let later = if has_objects(&path) { &mut *objects } else { &mut folders };
                    later.push(path);
                }
                Ok(kind) if kind.is_file() && !is_transient(&path) => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a folder is the one of a repository's objects. A branch may have any name.
fn has_objects(path: &str) -> bool {
    path.split_once("/repository.git/").is_some_and(|(_, below)| below == "objects")
}

/// Whether a file of a repository exists only while git writes: locks and temporary objects.
fn is_transient(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    let temporary = name.starts_with("tmp_") || path.contains("/tmp_objdir-");
    path.contains("repository.git/") && (name.ends_with(".lock") || temporary)
}

/// Warnings for the user about what the backup lacks.
pub(crate) fn warnings(created: &Created) -> Vec<String> {
    let mut warnings = Vec::new();
    if created.running > 0 {
        let sandboxes = count(created.running as u64, "sandbox");
        warnings.push(format!(
            "{sandboxes} ran: what was written there since the last snapshot is not saved"
        ));
    }
    if created.missing_layers > 0 {
        let layers = count(created.missing_layers as u64, "layer");
        warnings.push(format!("{layers} of snapshots were gone already"));
    }
    if created.left_out > 0 {
        let names = count(created.left_out, "name");
        warnings.push(format!("{names} left out: sockets, and paths too long for a tar"));
    }
    warnings
}

/// The error of a full disk names the next command.
pub(crate) fn explain(error: anyhow::Error) -> anyhow::Error {
    let is_full = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref() {
        Some(error) => io::Error::kind(error) == io::ErrorKind::StorageFull,
        None => matches!(cause.downcast_ref(), Some(PackError::Write(source))
            if source.kind() == io::ErrorKind::StorageFull),
    };
    if !error.chain().any(is_full) {
        return error;
    }
    let hint = "name a file on another disk, or add --without-images or --without-snapshots";
    error.context(Advice::new("the disk is full; no backup was made", hint))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn default_name_is_the_time_in_utc() {
        let time = Timestamp::from_millis(1_763_196_705_123);
        assert_eq!(default_name(time), Path::new("harvest-2025-11-15T085145Z.tar.gz"));
    }

    fn added(folder: &Path) -> Vec<String> {
        let mut added = Vec::new();
        let mut add = |path: &str| {
            added.push(path.to_owned());
            Ok(())
        };
        add_files(folder, &mut add).unwrap();
        added
    }

    #[test]
    fn references_come_before_git_objects() {
        let folder = tempfile::tempdir().unwrap();
        let git = folder.path().join("app/repository.git");
        for path in ["objects/aa", "refs/heads/a", "refs/heads/objects", "objects/pack"] {
            fs::create_dir_all(git.join(path)).unwrap();
        }
        for path in [
            "objects/aa/1",
            "objects/pack/tmp_pack_x",
            "refs/heads/a/b",
            "refs/heads/a/c.lock",
            "refs/heads/objects/d",
            "HEAD",
            "packed-refs",
        ] {
            fs::write(git.join(path), "").unwrap();
        }
        fs::write(folder.path().join("app/token"), "").unwrap();
        let files = added(folder.path());
        let names = files.iter().map(|path| path.rsplit('/').next().unwrap());
        let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
        assert_eq!(names, ["HEAD", "packed-refs", "b", "d", "token", "1"]);
        assert!(files.contains(&"app/repository.git/objects/pack/".to_owned()), "empty folders");
        assert_eq!(added(&folder.path().join("none")), [""; 0]);
    }

    fn git(folder: &Path, arguments: &[&str]) -> String {
        let mut command = Command::new("git");
        command.current_dir(folder).args(["-c", "user.name=a", "-c", "user.email=a@b.c"]);
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    #[test]
    fn push_during_backup_leaves_consistent_repository() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for path in ["forge/app/repository.git", "copy", "clone"] {
            fs::create_dir_all(at(path)).unwrap();
        }
        let bare = at("forge/app/repository.git");
        git(&bare, &["init", "--quiet", "--bare", "--initial-branch=main", "--template="]);
        git(&at("clone"), &["init", "--quiet", "--initial-branch=main"]);
        let push = || {
            git(&at("clone"), &["commit", "--quiet", "--allow-empty", "-m", "A commit"]);
            git(&at("clone"), &["push", "--quiet", bare.to_str().unwrap(), "HEAD:main"]);
        };
        push();
        add_files(&at("forge"), &mut |path| {
            if path.ends_with("/HEAD") {
                push();
            }
            let target = at("copy").join(path);
            match path.ends_with('/') {
                true => fs::create_dir_all(target)?,
                false => fs::copy(at("forge").join(path), target).map(drop)?,
            }
            Ok(())
        })
        .unwrap();
        let copy = at("copy/app/repository.git");
        git(&copy, &["fsck", "--strict"]);
        assert_eq!(git(&copy, &["rev-list", "--count", "main"]), "2", "the pushed commit");
    }
}
