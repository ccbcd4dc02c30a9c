//! Names, URLs, tokens and abandoned drafts of the forge. Tests with git clients are in `tests/`.

use std::path::Path;

use super::*;

fn forge() -> (tempfile::TempDir, LocalForge) {
    let folder = tempfile::tempdir().unwrap();
    let forge =
        LocalForge::open(folder.path().join("forge"), "http://127.0.0.1:7077/forge/").unwrap();
    (folder, forge)
}

#[test]
fn forge_recognises_its_own_urls() {
    let (_folder, forge) = forge();
    for own in [
        "http://127.0.0.1:7077/forge/local/app.git",
        "http://localhost:7077/forge/local/app",
        "http://x-access-token:t@127.0.0.1:7077/forge/local/app.git/",
    ] {
        assert_eq!(forge.repository_name(own).as_deref(), Some("local/app"), "{own}");
    }
    for other in [
        "https://127.0.0.1:7077/forge/local/app.git",
        "http://127.0.0.1:7078/forge/local/app.git",
        "http://127.0.0.1:7077/forge/local/../app.git",
        "http://127.0.0.1:7077/forge/app.git",
        "http://127.0.0.1:7077/forge/a/b.git",
        "http://127.0.0.1:7077/forge/local/.git",
        "http://127.0.0.1:7077/forgery/local/app.git",
        "http://127.0.0.1.evil.org:7077/forge/local/app.git",
        "git@127.0.0.1:app.git",
        "/srv/app.git",
    ] {
        assert_eq!(forge.repository_name(other), None, "{other}");
    }
}

#[test]
fn stable_url_follows_the_forges_address() {
    let (folder, forge) = forge();
    for path in ["/local/app.git", "/local/app/pr/1"] {
        let stable = forge.stable_url(&format!("http://127.0.0.1:7077/forge{path}"));
        assert!(!stable.contains("7077"), "{stable}");
        let moved =
            LocalForge::open(folder.path().join("forge"), "http://127.0.0.1:9/forge").unwrap();
        assert_eq!(moved.current_url(&stable), format!("http://127.0.0.1:9/forge{path}"));
    }
    let stable = forge.stable_url(&forge.url("app"));
    assert_eq!(forge.repository_name(&stable).as_deref(), Some("local/app"));
    // Spellings must agree: otherwise removing one registration would delete a repository that
    // another registration still uses.
    for other in
        ["http://localhost:7077/forge/local/app", "http://127.0.0.1:7077/forge/local/app.git/"]
    {
        assert_eq!(forge.stable_url(other), stable, "{other}");
    }
    for other in ["http://127.0.0.1:7077/forgery/app.git", "https://example.org/app.git"] {
        assert_eq!(
            (forge.stable_url(other), forge.current_url(other)),
            (other.to_owned(), other.to_owned())
        );
    }
}

#[tokio::test]
async fn repository_is_created_once_and_requires_its_token() {
    let (_folder, forge) = forge();
    let token = Secret::new("t0ken".to_owned());
    let url = forge.create("app", &token).await.unwrap();
    assert_eq!(url, "http://127.0.0.1:7077/forge/local/app.git");
    assert!(matches!(forge.create("app", &token).await, Err(ForgeError::Exists { .. })));
    assert!(
        forge.accepts_token("app", "t0ken")
            && !forge.accepts_token("app", "t0ke")
            && !forge.accepts_token("app", "")
    );
    assert!(!forge.accepts_token("other", "t0ken"));
    forge.set_token("app", &Secret::new("new".to_owned())).unwrap();
    assert!(forge.accepts_token("app", "new") && !forge.accepts_token("app", "t0ken"));
    assert_eq!(forge.names().unwrap(), ["local/app"]);
    assert!(
        !fs::read_to_string(forge.existing_folder("app").unwrap().join("token"))
            .unwrap()
            .contains("new")
    );
}

#[test]
fn only_one_process_holds_the_registration_lock() {
    let (_folder, forge) = forge();
    let lock = forge.try_lock().unwrap();
    assert!(lock.is_some() && forge.try_lock().unwrap().is_none());
    drop(lock);
    assert!(forge.try_lock().unwrap().is_some());
    assert!(forge.names().unwrap().is_empty());
}

#[tokio::test]
async fn open_removes_abandoned_drafts_but_not_recent_ones() {
    let (folder, forge) = forge();
    forge.create("app", &Secret::new("t".to_owned())).await.unwrap();
    let objects = forge.repository_path("app").unwrap().join("objects");
    let long_ago = std::time::SystemTime::now() - ABANDONED_AFTER * 2;
    let draft = |path: &Path, old: bool| {
        fs::create_dir(path).unwrap();
        if old {
            fs::File::open(path).unwrap().set_modified(long_ago).unwrap();
        }
    };
    let (old, young) =
        (objects.join("tmp_objdir-incoming-a"), objects.join("tmp_objdir-incoming-b"));
    draft(&old, true);
    draft(&young, false);
    draft(&folder.path().join("forge/.new-x"), true);
    LocalForge::open(folder.path().join("forge"), "http://127.0.0.1:1/forge").unwrap();
    assert!(!old.exists() && young.exists() && !folder.path().join("forge/.new-x").exists());
    assert!(forge.repository_path("app").unwrap().join("HEAD").is_file());
}

#[tokio::test]
async fn names_that_escape_the_root_are_rejected() {
    let (_folder, forge) = forge();
    for name in
        ["", ".", "..", "../x", "a/b", ".hidden", "-option", "a\0b", "ä", "x.git", &"a".repeat(101)]
    {
        let created = forge.create(name, &Secret::new("t".to_owned())).await;
        assert!(matches!(created, Err(ForgeError::InvalidName(_))), "{name}");
    }
}

#[test]
fn forge_is_private_even_in_a_readable_home() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("forge");
    fs::create_dir(&root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
    LocalForge::open(root.clone(), "http://127.0.0.1:7077/forge").unwrap();
    assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
}
