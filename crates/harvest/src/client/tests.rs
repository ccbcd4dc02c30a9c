//! What is said of and to a server that does not answer as wished.

use super::*;

#[test]
fn only_a_url_names_a_server() {
    assert!(names_server("http://127.0.0.1:7070/") && names_server("https://agents.example.org"));
    for bad in ["", "notaurl", "127.0.0.1:7070", "file:///etc/passwd", "ftp://h/"] {
        assert!(!names_server(bad), "{bad}");
    }
}

#[test]
fn the_next_page_is_asked_for_whether_or_not_the_path_has_a_query() {
    assert_eq!(from_cursor("/v1/tokens", "a=b"), "/v1/tokens?cursor=a%3Db");
    assert_eq!(from_cursor("/v1/sessions?limit=2", "c"), "/v1/sessions?limit=2&cursor=c");
}

#[test]
fn a_server_that_is_gone_is_not_found_though_its_number_is_somebodys() {
    let home = tempfile::tempdir().unwrap();
    let flags =
        crate::cli::Global { home: Some(home.path().to_owned()), ..crate::cli::Global::default() };
    let config = Config::load(&flags, &|_| None).unwrap();
    let file = ServerFile { url: "http://127.0.0.1:1".into(), pid: std::process::id() };
    std::fs::write(config.server_file(), serde_json::to_vec(&file).unwrap()).unwrap();
    assert!(local(&config).is_err(), "nobody serves from here");
    let lock = std::fs::File::create(home.path().join("server.lock")).unwrap();
    assert!(local(&config).is_err(), "the lock of a server that was killed stays behind, too");
    lock.lock().unwrap();
    assert_eq!(local(&config).unwrap().pid, std::process::id());
}

#[test]
fn a_name_that_would_lead_elsewhere_is_refused() {
    assert!(segment("calc.py-2_x").is_ok());
    for bad in ["", "..", "a/b", "a?b", "a b", "%2e"] {
        assert!(segment(bad).is_err(), "{bad}");
    }
}
