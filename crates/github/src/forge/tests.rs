//! Names, URLs, tokens and left-overs of the forge; what git makes of it is in the crate's own tests.

use std::path::Path;

use super::*;

fn forge() -> (tempfile::TempDir, Forge) {
    let folder = tempfile::tempdir().unwrap();
    let forge = Forge::open(folder.path().join("forge"), "http://127.0.0.1:7077/forge/").unwrap();
    (folder, forge)
}

#[test]
fn a_forge_knows_its_own_urls() {
    let (_folder, forge) = forge();
    for own in [
        "http://127.0.0.1:7077/forge/app.git",
        "http://localhost:7077/forge/app",
        "http://x-access-token:t@127.0.0.1:7077/forge/app.git/",
    ] {
        assert_eq!(forge.owns(own).as_deref(), Some("app"), "{own}");
    }
    for other in [
        "https://127.0.0.1:7077/forge/app.git",
        "http://127.0.0.1:7078/forge/app.git",
        "http://127.0.0.1:7077/forge/../app.git",
        "http://127.0.0.1:7077/forge/a/b.git",
        "http://127.0.0.1:7077/forge/.git",
        "http://127.0.0.1:7077/forgery/app.git",
        "http://127.0.0.1.evil.org:7077/forge/app.git",
        "git@127.0.0.1:app.git",
        "/srv/app.git",
    ] {
        assert_eq!(forge.owns(other), None, "{other}");
    }
}

#[test]
fn a_remembered_url_leads_to_wherever_the_forge_is_now() {
    let (folder, forge) = forge();
    for path in ["/app.git", "/app/pulls/1"] {
        let kept = forge.lasting(&format!("http://127.0.0.1:7077/forge{path}"));
        assert!(!kept.contains("7077"), "{kept}");
        let moved = Forge::open(folder.path().join("forge"), "http://127.0.0.1:9/forge").unwrap();
        assert_eq!(moved.current(&kept), format!("http://127.0.0.1:9/forge{path}"));
    }
    assert_eq!(forge.owns(&forge.lasting(&forge.url("app"))).as_deref(), Some("app"));
    // Or who removes a repository by one of its names would remove it from under another.
    for other in ["http://localhost:7077/forge/app", "http://127.0.0.1:7077/forge/app.git/"] {
        assert_eq!(forge.lasting(other), forge.lasting(&forge.url("app")), "{other}");
    }
    for other in ["http://127.0.0.1:7077/forgery/app.git", "https://example.org/app.git"] {
        assert_eq!(
            (forge.lasting(other), forge.current(other)),
            (other.to_owned(), other.to_owned())
        );
    }
}

#[tokio::test]
async fn a_repository_is_made_once_and_opened_by_its_token_only() {
    let (_folder, forge) = forge();
    let token = Secret::new("t0ken".to_owned());
    assert_eq!(forge.create("app", &token).await.unwrap(), "http://127.0.0.1:7077/forge/app.git");
    assert!(matches!(forge.create("app", &token).await, Err(ForgeError::Exists { .. })));
    assert!(forge.opens("app", "t0ken") && !forge.opens("app", "t0ke") && !forge.opens("app", ""));
    assert!(!forge.opens("other", "t0ken"));
    forge.set_token("app", &Secret::new("new".to_owned())).unwrap();
    assert!(forge.opens("app", "new") && !forge.opens("app", "t0ken"));
    assert_eq!(forge.names().unwrap(), ["app"]);
    assert!(
        !fs::read_to_string(forge.existing("app").unwrap().join("token")).unwrap().contains("new")
    );
}

#[test]
fn one_at_a_time_holds_the_forge() {
    let (_folder, forge) = forge();
    let held = forge.hold().unwrap();
    assert!(held.is_some() && forge.hold().unwrap().is_none());
    drop(held);
    assert!(forge.hold().unwrap().is_some());
    assert_eq!(forge.names().unwrap(), [] as [String; 0]);
}

#[tokio::test]
async fn what_a_killed_process_left_long_ago_is_removed_when_the_forge_opens() {
    let (folder, forge) = forge();
    forge.create("app", &Secret::new("t".to_owned())).await.unwrap();
    let objects = forge.repository("app").unwrap().join("objects");
    let long_ago = std::time::SystemTime::now() - LEFT_OVER * 2;
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
    Forge::open(folder.path().join("forge"), "http://127.0.0.1:1/forge").unwrap();
    assert!(!old.exists() && young.exists() && !folder.path().join("forge/.new-x").exists());
    assert!(forge.repository("app").unwrap().join("HEAD").is_file());
}

#[tokio::test]
async fn names_that_could_lead_elsewhere_are_refused() {
    let (_folder, forge) = forge();
    for name in
        ["", ".", "..", "../x", "a/b", ".hidden", "-option", "a\0b", "ä", "x.git", &"a".repeat(101)]
    {
        let made = forge.create(name, &Secret::new("t".to_owned())).await;
        assert!(matches!(made, Err(ForgeError::BadName { .. })), "{name}");
    }
}
