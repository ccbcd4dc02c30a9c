//! Imports of folders, which are untrusted and never modified.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use harvest_forge::{ImportError, ImportedFolder, LocalForge};
use harvest_proto::{Secret, bridge::Author};

struct Fixture {
    folder: tempfile::TempDir,
    forge: LocalForge,
}

impl Fixture {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let forge =
            LocalForge::open(folder.path().join("forge"), "http://127.0.0.1:1/forge").unwrap();
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

    /// Imports the folder and asserts that it is unchanged.
    async fn import(&self) -> Result<ImportedFolder, ImportError> {
        let (source, before) = (self.source(), contents(&self.source()));
        let imported = self.forge.import_folder("app", &source, Some(&author())).await;
        assert_eq!(contents(&source), before, "the folder is only read");
        imported
    }

    /// The output of a git command in the forge's repository.
    fn git(&self, arguments: &str) -> String {
        sh(&self.forge.repository_path("app").unwrap(), &format!("git {arguments}"))
    }
}

fn author() -> Author {
    Author { name: "Ada".into(), email: "ada@example.org".into() }
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

/// Every file with its mode, modification time and content.
fn contents(folder: &Path) -> BTreeMap<PathBuf, (u32, i64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let content = if metadata.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if metadata.is_dir() {
                folders.push(path.clone());
            }
            all.insert(path, (metadata.mode(), metadata.mtime(), content));
        }
    }
    all
}

#[tokio::test]
async fn uncommitted_files_are_reported_but_not_imported() {
    let fixture = Fixture::new().await;
    let folder = fixture.repository();
    let imported = fixture.import().await.unwrap();
    assert_eq!((imported.branch.as_str(), imported.notes.len()), ("trunk", 0));
    assert_eq!(fixture.git("rev-parse HEAD").trim(), imported.commit);
    assert_eq!(fixture.forge.source_folder("app"), Some(folder.clone()));

    fs::write(folder.join("file"), "changed\n").unwrap();
    fs::write(folder.join("new\u{1b}[31m"), "").unwrap();
    sh(
        &folder,
        "echo ignored > ignored && echo /ignored > .git/info/exclude && echo x > staged && git add staged",
    );
    let again = fixture.import().await.unwrap();
    assert_eq!(again.commit, imported.commit);
    let [note] = &again.notes[..] else { panic!("{:?}", again.notes) };
    for named in ["`file`", "`staged`", "`new?[31m`"] {
        assert!(note.contains(named), "no {named} in {note}");
    }
    assert!(!note.contains("ignored"), "{note}");

    // The copy follows even a rewritten history.
    sh(&folder, "git add -A && git commit -q --amend -m two");
    let third = fixture.import().await.unwrap();
    assert!(third.commit != imported.commit && third.notes.is_empty(), "{third:?}");
    assert_eq!(fixture.git("show trunk:file"), "changed\n");
}

#[tokio::test]
async fn folder_without_a_usable_branch_is_rejected() {
    let fixture = Fixture::new().await;
    let folder = fixture.source();
    assert!(matches!(fixture.import().await, Err(ImportError::Empty { .. })));
    sh(&folder, "git init -q -b trunk");
    assert!(matches!(fixture.import().await, Err(ImportError::NoCommit { .. })));
    fixture.repository();
    sh(&folder, "git checkout -q --detach");
    assert!(matches!(fixture.import().await, Err(ImportError::NoBranch { .. })));
    sh(&folder, "git checkout -q -b 'fix,12'");
    assert!(matches!(fixture.import().await, Err(ImportError::BranchName { .. })));
}

#[tokio::test]
async fn session_branch_is_only_fast_forwarded() {
    let fixture = Fixture::new().await;
    let folder = fixture.repository();
    sh(&folder, "git checkout -q -b harvest/work && git commit -q --allow-empty -m two");
    fixture.import().await.unwrap();
    sh(&folder, "git reset -q --hard HEAD~1");
    assert!(matches!(fixture.import().await, Err(ImportError::Behind { .. })));
}

#[tokio::test]
async fn bare_shallow_and_linked_repositories_are_imported() {
    let fixture = Fixture::new().await;
    let folder = fixture.repository();
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
        let imported = fixture
            .forge
            .import_folder("app", &other, Some(&author()))
            .await
            .unwrap_or_else(|error| panic!("{make}: {error:?}"));
        assert_eq!(imported.commit, commit.trim(), "{make}");
        assert_eq!(
            imported.notes.len(),
            usize::from(other.join("file").exists()),
            "{make}: {imported:?}"
        );
        fs::remove_dir_all(other).unwrap();
    }
}

#[tokio::test]
async fn folder_without_git_becomes_commits_on_main() {
    let fixture = Fixture::new().await;
    let folder = fixture.source();
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
    let imported = fixture.import().await.unwrap();
    let listed = fixture.git("ls-tree -r main");
    let names: Vec<_> = listed.lines().filter_map(|line| line.split('\t').nth(1)).collect();
    assert_eq!(names, [".gitignore", "a/b/run.sh", "out"], "{listed}");
    assert!(
        listed.contains("100755") && listed.contains("120000"),
        "symlinks stay symlinks: {listed}"
    );
    assert_eq!(fixture.git("show main:out"), "/etc");
    assert!(
        imported.notes[0].contains("pipe") && imported.notes[1].contains("nested"),
        "{:?}",
        imported.notes
    );
    assert_eq!(fixture.import().await.unwrap().commit, imported.commit, "nothing changed");
    fs::remove_file(folder.join("out")).unwrap();
    let next = fixture.import().await.unwrap();
    assert_eq!(fixture.git("rev-parse main~1").trim(), imported.commit);
    assert_ne!(next.commit, imported.commit);
}

#[tokio::test]
async fn secrets_and_packages_are_never_imported() {
    let fixture = Fixture::new().await;
    let folder = fixture.source();
    let files = [
        "app.py",
        ".env",
        "deploy/.env.production",
        "web/node_modules/left-pad/index.js",
        "lib/__pycache__/app.pyc",
        ".venv/bin/python",
        "py3/pyvenv.cfg",
        "py3/lib/site.py",
        "data/big.bin",
    ];
    for name in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "1234").unwrap();
    }
    fs::write(folder.join(".ignore"), "data/\n").unwrap();
    fs::write(folder.join(".gitignore"), "!.env\n!node_modules\n").unwrap();
    let summary = fixture.forge.folder_summary(&folder).await.unwrap().unwrap();
    assert_eq!((summary.files, summary.bytes), (3, 4 + 6 + 20), "{summary:?}");
    let imported = fixture.import().await.unwrap();
    assert_eq!(fixture.git("ls-tree -r --name-only main"), ".gitignore\n.ignore\napp.py\n");
    assert_eq!(imported.notes, summary.notes);
    let notes = imported.notes.join("\n");
    assert!(notes.contains("left out secrets and installed packages: "), "{notes}");
    assert!(notes.contains("and 3 more"), "all six are counted: {notes}");
}

#[tokio::test]
async fn git_repository_has_no_folder_summary() {
    let fixture = Fixture::new().await;
    let folder = fixture.repository();
    assert_eq!(fixture.forge.folder_summary(&folder).await.unwrap(), None);
}

/// A program that records that it ran.
fn program(mark: &Path) -> String {
    let program = mark.with_file_name("program");
    fs::write(&program, format!("#!/bin/sh\necho ran >> {}\n", mark.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program.display().to_string()
}

/// Makes every configurable command of the folder's git run `program`.
fn booby_trap(folder: &Path, mark: &Path) {
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
async fn hostile_repository_executes_nothing() {
    let fixture = Fixture::new().await;
    let (folder, mark) = (fixture.repository(), fixture.folder.path().join("mark"));
    sh(&folder, "git commit -q --allow-empty -m two");
    booby_trap(&folder, &mark);
    fs::write(folder.join("file"), "dirty\n").unwrap();
    let imported = fixture.import().await.unwrap();
    assert!(!imported.notes.is_empty());
    assert!(!mark.exists(), "{:?}", fs::read_to_string(&mark));

    // git would fetch a missing object with a program that the folder's configuration names.
    let blob = sh(&folder, "git -c core.fsmonitor=false rev-parse HEAD:file");
    let blob = blob.trim();
    fs::remove_file(folder.join(".git/objects").join(&blob[..2]).join(&blob[2..])).unwrap();
    fixture.forge.remove("app").unwrap();
    fixture.forge.create("app", &Secret::new("t".to_owned())).await.unwrap();
    assert!(fixture.import().await.is_err(), "the repository is incomplete");
    assert!(!mark.exists(), "{:?}", fs::read_to_string(&mark));

    // Control: plain git in this folder does run the program.
    let _ = Command::new("git").args(["status"]).current_dir(&folder).output();
    assert!(mark.exists());
}

#[tokio::test]
async fn hostile_folder_without_git_executes_nothing() {
    let fixture = Fixture::new().await;
    let (folder, mark) = (fixture.repository(), fixture.folder.path().join("mark"));
    booby_trap(&folder, &mark);
    let inner = folder.join("inner");
    fs::create_dir(&inner).unwrap();
    fs::rename(folder.join(".git"), inner.join(".git")).unwrap();
    fs::write(
        folder.join(".gitmodules"),
        "[submodule \"inner\"]\n\tpath = inner\n\turl = ext::sh -c evil\n",
    )
    .unwrap();
    fixture.import().await.unwrap();
    assert!(!mark.exists(), "{:?}", fs::read_to_string(&mark));
}

#[tokio::test]
async fn removed_repository_frees_its_name() {
    let fixture = Fixture::new().await;
    fixture.repository();
    fixture.import().await.unwrap();
    fixture.forge.remove("app").unwrap();
    fixture.forge.remove("app").unwrap();
    assert_eq!(
        (fixture.forge.names().unwrap(), fixture.forge.source_folder("app")),
        (Vec::new(), None)
    );
    assert!(fixture.forge.remove("../app").is_err() && fixture.source().exists());
    let left: Vec<_> = fs::read_dir(fixture.folder.path().join("forge"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".gitconfig"]);
}
