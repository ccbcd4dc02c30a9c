//! Folders that become repositories of the forge: read, never obeyed and never changed.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use harvest_github::{Forge, TakeError, Taken};
use harvest_proto::Secret;

struct Desk {
    folder: tempfile::TempDir,
    forge: Forge,
}

impl Desk {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let forge = Forge::open(folder.path().join("forge"), "http://127.0.0.1:1/forge").unwrap();
        forge.create("app", &Secret::new("t".to_owned())).await.unwrap();
        fs::create_dir(folder.path().join("app")).unwrap();
        Self { folder, forge }
    }

    fn source(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join("app")
    }

    /// A git repository with one commit on `trunk`.
    fn repository(&self) -> PathBuf {
        let folder = self.source();
        fs::write(folder.join("file"), "one\n").unwrap();
        sh(&folder, "git init -q -b trunk && git add -A && git commit -qm one");
        folder
    }

    /// Takes it and sees that nothing of it has changed.
    async fn take(&self) -> Result<Taken, TakeError> {
        let (source, before) = (self.source(), picture(&self.source()));
        let taken = self.forge.take("app", &source).await;
        assert_eq!(picture(&source), before, "the folder is only read");
        taken
    }

    /// What the forge has, as `git` prints it.
    fn git(&self, arguments: &str) -> String {
        sh(&self.forge.repository("app").unwrap(), &format!("git {arguments}"))
    }
}

fn sh(folder: &Path, script: &str) -> String {
    let output = Command::new("sh")
        .args(["-ec", script])
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_NAME"), "Ada")))
        .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_EMAIL"), "ada@example.org")))
        .output()
        .unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Every file with its kind, mode, time and content.
fn picture(folder: &Path) -> BTreeMap<PathBuf, (u32, i64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let about = fs::symlink_metadata(&path).unwrap();
            let content = if about.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if about.is_dir() {
                folders.push(path.clone());
            }
            all.insert(path, (about.mode(), about.mtime(), content));
        }
    }
    all
}

#[tokio::test]
async fn the_branch_checked_out_is_taken_and_what_is_not_committed_is_named() {
    let desk = Desk::new().await;
    let folder = desk.repository();
    let taken = desk.take().await.unwrap();
    assert_eq!((taken.branch.as_str(), taken.notes.len()), ("trunk", 0));
    assert_eq!(desk.git("rev-parse HEAD").trim(), taken.commit);
    assert_eq!(desk.forge.source("app"), Some(folder.clone()));

    fs::write(folder.join("file"), "changed\n").unwrap();
    fs::write(folder.join("new\u{1b}[31m"), "").unwrap();
    sh(
        &folder,
        "echo ignored > ignored && echo /ignored > .git/info/exclude && echo x > staged && git add staged",
    );
    let again = desk.take().await.unwrap();
    assert_eq!(again.commit, taken.commit);
    let [note] = &again.notes[..] else { panic!("{:?}", again.notes) };
    for named in ["`file`", "`staged`", "`new?[31m`"] {
        assert!(note.contains(named), "no {named} in {note}");
    }
    assert!(!note.contains("ignored"), "{note}");

    // Committed, even over a rewritten history: the copy is brought up to date.
    sh(&folder, "git add -A && git commit -q --amend -m two");
    let third = desk.take().await.unwrap();
    assert!(third.commit != taken.commit && third.notes.is_empty(), "{third:?}");
    assert_eq!(desk.git("show trunk:file"), "changed\n");
}

#[tokio::test]
async fn what_cannot_be_started_from_says_why() {
    let desk = Desk::new().await;
    let folder = desk.source();
    assert!(matches!(desk.take().await, Err(TakeError::Empty { .. })));
    sh(&folder, "git init -q -b trunk");
    assert!(matches!(desk.take().await, Err(TakeError::NoCommit { .. })));
    desk.repository();
    sh(&folder, "git checkout -q --detach");
    assert!(matches!(desk.take().await, Err(TakeError::NoBranch { .. })));
    sh(&folder, "git checkout -q -b 'fix#12'");
    assert!(matches!(desk.take().await, Err(TakeError::BranchName { .. })));
}

#[tokio::test]
async fn a_sessions_branch_is_never_taken_back() {
    let desk = Desk::new().await;
    let folder = desk.repository();
    sh(&folder, "git checkout -q -b harvest/work && git commit -q --allow-empty -m two");
    desk.take().await.unwrap();
    sh(&folder, "git reset -q --hard HEAD~1");
    assert!(matches!(desk.take().await, Err(TakeError::Behind { .. })));
}

#[tokio::test]
async fn a_bare_a_shallow_and_a_linked_repository_are_taken_too() {
    let desk = Desk::new().await;
    let folder = desk.repository();
    sh(&folder, "git commit -q --allow-empty -m two");
    for make in [
        "git clone -q --bare app other",
        "git clone -q --depth 1 file://$PWD/app other",
        "git -C app worktree add -q -b linked ../other",
    ] {
        let other = folder.with_file_name("other");
        sh(folder.parent().unwrap(), make);
        let commit = sh(&other, "git rev-parse HEAD");
        if other.join("file").exists() {
            fs::write(other.join("file"), "x").unwrap();
        }
        let taken = desk
            .forge
            .take("app", &other)
            .await
            .unwrap_or_else(|error| panic!("{make}: {error:?}"));
        assert_eq!(taken.commit, commit.trim(), "{make}");
        assert_eq!(
            taken.notes.len(),
            usize::from(other.join("file").exists()),
            "{make}: {taken:?}"
        );
        fs::remove_dir_all(other).unwrap();
    }
}

#[tokio::test]
async fn a_plain_folders_files_become_a_commit_and_only_what_changed_another() {
    let desk = Desk::new().await;
    let folder = desk.source();
    fs::create_dir_all(folder.join("a/b")).unwrap();
    fs::write(folder.join("a/b/run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(folder.join("a/b/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(folder.join(".gitignore"), "*.log\n").unwrap();
    fs::write(folder.join("big.log"), "x").unwrap();
    symlink("/etc", folder.join("out")).unwrap();
    fs::create_dir(folder.join("nested")).unwrap();
    fs::write(folder.join("nested/file"), "x").unwrap();
    sh(&folder.join("nested"), "git init -q && git add -A && git commit -qm x");
    sh(&folder, "mkfifo pipe");
    let taken = desk.take().await.unwrap();
    let listed = desk.git("ls-tree -r main");
    let names: Vec<_> = listed.lines().filter_map(|line| line.split('\t').nth(1)).collect();
    assert_eq!(names, [".gitignore", "a/b/run.sh", "out"], "{listed}");
    assert!(
        listed.contains("100755") && listed.contains("120000"),
        "a link stays a link: {listed}"
    );
    assert_eq!(desk.git("show main:out"), "/etc");
    assert!(
        taken.notes[0].contains("pipe") && taken.notes[1].contains("nested"),
        "{:?}",
        taken.notes
    );
    assert_eq!(desk.take().await.unwrap().commit, taken.commit, "nothing changed");
    fs::remove_file(folder.join("out")).unwrap();
    let next = desk.take().await.unwrap();
    assert_eq!(desk.git("rev-parse main~1").trim(), taken.commit);
    assert_ne!(next.commit, taken.commit);
}

/// A program that writes down that it ran.
fn program(mark: &Path) -> String {
    let program = mark.with_file_name("program");
    fs::write(&program, format!("#!/bin/sh\necho ran >> {}\n", mark.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program.display().to_string()
}

fn arm(folder: &Path, mark: &Path) {
    let program = program(mark);
    let config = [
        "core.fsmonitor",
        "core.sshCommand",
        "core.gitProxy",
        "core.pager",
        "core.editor",
        "core.alternateRefsCommand",
        "filter.evil.clean",
        "filter.evil.smudge",
        "filter.evil.process",
        "diff.evil.textconv",
        "diff.evil.command",
        "diff.external",
        "credential.helper",
        "gpg.program",
        "uploadpack.packObjectsHook",
        "alias.fetch",
        "alias.upload-pack",
        "alias.status",
        "remote.evil.uploadpack",
        "merge.evil.driver",
    ];
    for key in config {
        sh(folder, &format!("git config {key} \"{program}\""));
    }
    sh(
        folder,
        "git config core.hooksPath hooks && git config protocol.ext.allow always && git config protocol.allow always",
    );
    sh(folder, &format!("git config 'url.ext::{program}.insteadOf' /"));
    sh(folder, &format!("git config remote.evil.url ext::{program}"));
    sh(folder, "git config extensions.partialClone evil && git config remote.evil.promisor true");
    sh(
        folder,
        "printf '* filter=evil diff=evil merge=evil\\n' > .git/info/attributes; cp .git/info/attributes .gitattributes",
    );
    let hooks = "post-index-change pre-push reference-transaction post-checkout pre-auto-gc fsmonitor-watchman update";
    let script = format!(
        "mkdir -p hooks .git/hooks; for hook in {hooks}; do \
         printf '#!/bin/sh\\n%s\\n' \"{program}\" > hooks/$hook; chmod +x hooks/$hook; cp hooks/$hook .git/hooks/; done"
    );
    sh(folder, &script);
}

#[tokio::test]
async fn a_hostile_folder_runs_nothing_here() {
    let desk = Desk::new().await;
    let (folder, mark) = (desk.repository(), desk.folder.path().join("mark"));
    sh(&folder, "git commit -q --allow-empty -m two");
    arm(&folder, &mark);
    fs::write(folder.join("file"), "dirty\n").unwrap();
    let taken = desk.take().await.unwrap();
    assert!(!taken.notes.is_empty());
    assert!(!mark.exists(), "{:?}", fs::read_to_string(&mark));

    // An object that is not there would be fetched, by a program of the folder's choice.
    let blob = sh(&folder, "git -c core.fsmonitor=false rev-parse HEAD:file");
    let blob = blob.trim();
    fs::remove_file(folder.join(".git/objects").join(&blob[..2]).join(&blob[2..])).unwrap();
    desk.forge.remove("app").unwrap();
    desk.forge.create("app", &Secret::new("t".to_owned())).await.unwrap();
    assert!(desk.take().await.is_err(), "it is not whole");
    assert!(!mark.exists(), "{:?}", fs::read_to_string(&mark));

    // The trap is a trap: whoever uses git in there falls into it.
    let _ = Command::new("git").args(["status"]).current_dir(&folder).output();
    assert!(mark.exists());
}

#[tokio::test]
async fn a_hostile_folder_without_git_runs_nothing_either() {
    let desk = Desk::new().await;
    let (folder, mark) = (desk.repository(), desk.folder.path().join("mark"));
    arm(&folder, &mark);
    let inner = folder.join("inner");
    fs::create_dir(&inner).unwrap();
    fs::rename(folder.join(".git"), inner.join(".git")).unwrap();
    fs::write(
        folder.join(".gitmodules"),
        "[submodule \"inner\"]\n\tpath = inner\n\turl = ext::sh -c evil\n",
    )
    .unwrap();
    desk.take().await.unwrap();
    assert!(!mark.exists(), "{:?}", fs::read_to_string(&mark));
}

#[tokio::test]
async fn a_removed_repository_is_gone_and_its_name_free() {
    let desk = Desk::new().await;
    desk.repository();
    desk.take().await.unwrap();
    desk.forge.remove("app").unwrap();
    desk.forge.remove("app").unwrap();
    assert_eq!((desk.forge.names().unwrap(), desk.forge.source("app")), (Vec::new(), None));
    assert!(desk.forge.remove("../app").is_err() && desk.source().exists());
    let left: Vec<_> = fs::read_dir(desk.folder.path().join("forge"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".gitconfig"]);
}
