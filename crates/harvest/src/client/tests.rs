//! URLs, paths and the file of a running server.

use super::*;

#[test]
fn server_url_must_be_http() {
    assert!(is_server_url("http://127.0.0.1:7070/") && is_server_url("https://agents.example.org"));
    for bad in ["", "notaurl", "127.0.0.1:7070", "file:///etc/passwd", "ftp://h/"] {
        assert!(!is_server_url(bad), "{bad}");
    }
}

#[test]
fn cursor_is_appended_to_any_path() {
    assert_eq!(with_cursor("/v1/tokens", "a=b"), "/v1/tokens?cursor=a%3Db");
    assert_eq!(with_cursor("/v1/sessions?limit=2", "c"), "/v1/sessions?limit=2&cursor=c");
}

#[test]
fn stopped_server_is_not_found_by_reused_pid() {
    let home = tempfile::tempdir().unwrap();
    let flags = crate::cli::GlobalFlags {
        home: Some(home.path().to_owned()),
        ..crate::cli::GlobalFlags::default()
    };
    let config = Config::load(&flags, &|_| None).unwrap();
    let file = ServerFile { url: "http://127.0.0.1:1".into(), pid: std::process::id() };
    std::fs::write(config.server_file(), serde_json::to_vec(&file).unwrap()).unwrap();
    assert!(local(&config).is_err(), "no server holds the lock");
    let lock = std::fs::File::create(home.path().join("server.lock")).unwrap();
    assert!(local(&config).is_err(), "a killed server leaves its lock file behind");
    lock.lock().unwrap();
    assert_eq!(local(&config).unwrap().pid, std::process::id());
}

#[test]
fn names_that_change_the_path_are_refused() {
    assert!(path_segment("calc.py-2_x").is_ok());
    for bad in ["", "..", "a/b", "a?b", "a b", "%2e"] {
        assert!(path_segment(bad).is_err(), "{bad}");
    }
}
