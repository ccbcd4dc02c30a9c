//! The repositories of a session, and what is known of each; sessions found by what they are made from.

use harvest_proto::{SessionId, api::Pull};
use harvest_store::{NewSession, SessionFilter, Write};

use crate::home::{Home, Kept, NOW, new_session, on_both};

on_both!(
    what_is_learned_of_one_repository_is_not_said_of_another,
    a_session_has_a_pull_request_in_each_of_its_repositories,
    a_repository_is_in_use_by_whoever_has_it_among_others,
    a_session_is_found_by_what_it_is_made_from,
    a_store_of_the_first_version_keeps_what_it_knew,
);

async fn what_is_learned_of_one_repository_is_not_said_of_another(home: Home) {
    let session = home.session().await;
    let of = |repository: &str| repository.to_owned();
    let facts = vec![
        Write::BaseCommit { repository: of("s"), commit: "b".into() },
        Write::DefaultBase { repository: of("s"), base: "main".into() },
        Write::DefaultBase { repository: of("s"), base: "other".into() },
        Write::Pushed { repository: of("r"), commit: "p".into() },
    ];
    home.commit(&session, facts).await.unwrap();
    let record = home.store.session_get(&session).await.unwrap();
    let [r, s] = &record.checkouts[..] else { panic!("{record:?}") };
    assert_eq!(
        (r.base.as_deref(), s.base.as_deref(), s.base_commit.as_deref()),
        (None, Some("main"), Some("b"))
    );
    assert_eq!((r.unreviewed(), s.unreviewed()), (Some("p"), None));
    home.commit(&session, vec![Write::Reviewed { repository: of("r"), commit: "p".into() }])
        .await
        .unwrap();
    assert_eq!(home.store.session_get(&session).await.unwrap().checkouts[0].unreviewed(), None);
}

fn pull(number: u64) -> Pull {
    Pull {
        number,
        url: format!("http://forge/{number}"),
        title: "t".into(),
        body: String::new(),
        state: "open".into(),
        branch: "b".into(),
        base: "main".into(),
        commit: "c".into(),
        evidence: None,
    }
}

async fn a_session_has_a_pull_request_in_each_of_its_repositories(home: Home) {
    let session = home.session().await;
    for (repository, number) in [("s", 1), ("r", 2), ("s", 3)] {
        let write = Write::Pull {
            repository: repository.to_owned(),
            pull: Box::new(pull(number)),
            at: NOW,
        };
        home.commit(&session, vec![write]).await.unwrap();
    }
    let shown = home.store.session_get(&session).await.unwrap().session;
    let numbers: Vec<_> =
        shown.repositories.iter().map(|one| one.pull.as_ref().unwrap().number).collect();
    assert_eq!((numbers, shown.pr_number), (vec![2, 3], Some(2)));
    assert_eq!(home.store.pull_list().await.unwrap().len(), 2);
}

async fn a_repository_is_in_use_by_whoever_has_it_among_others(home: Home) {
    let session = home.session().await;
    home.kept
        .sql("INSERT INTO repositories (name, url, image, created_at) VALUES ('s', 'http://h/s', 'i', 1)")
        .await;
    assert!(home.store.repository_delete("s", NOW).await.is_err());
    home.store.session_delete(&session, home.lease, Vec::new(), NOW).await.unwrap();
    home.store.repository_delete("s", NOW).await.unwrap();
}

async fn a_session_is_found_by_what_it_is_made_from(home: Home) {
    let new =
        NewSession { title: "Fix 100% of Äpfel_x".into(), key: Some("k".into()), ..new_session() };
    let id = new.id.clone();
    home.store.session_insert(home.lease, new, Vec::new()).await.unwrap();
    let bare = NewSession { checkouts: Vec::new(), ..new_session() };
    home.store.session_insert(home.lease, bare, Vec::new()).await.unwrap();
    let found = async |filter: SessionFilter| -> Vec<SessionId> {
        let records = home.store.session_find(&filter, None, 10).await.unwrap();
        records.into_iter().map(|record| record.session.id).collect()
    };
    let title = |text: &str| SessionFilter { title: Some(text.into()), ..SessionFilter::default() };
    for text in ["fix", "100%", "X", "Äpfel_"] {
        assert_eq!(found(title(text)).await, std::slice::from_ref(&id), "{text}");
    }
    assert!(found(title("100_")).await.is_empty() && found(title("fix%of")).await.is_empty());
    let named =
        |name: &str| SessionFilter { repository: Some(name.into()), ..SessionFilter::default() };
    assert_eq!(found(named("s")).await, std::slice::from_ref(&id));
    assert_eq!(
        found(SessionFilter { key: Some("k".into()), ..named("r") }).await,
        std::slice::from_ref(&id)
    );
    assert!(found(named("t")).await.is_empty());
    assert_eq!(home.store.session_by_key("k").await.unwrap(), Some(id));
    let again = NewSession { key: Some("k".into()), ..new_session() };
    assert!(
        home.store.session_insert(home.lease, again, Vec::new()).await.is_err(),
        "a key names one"
    );
}

async fn a_store_of_the_first_version_keeps_what_it_knew(home: Home) {
    let kept = match home.kept {
        Kept::File(_) => Kept::sqlite(),
        Kept::Server(_) => Kept::postgres(),
    };
    kept.sql(include_str!("../../src/schema/0001.sql")).await;
    let id = SessionId::random();
    let json = serde_json::to_string(&pull(4)).unwrap();
    for sql in [
        "CREATE TABLE schema_version (version BIGINT NOT NULL)",
        "INSERT INTO schema_version (version) VALUES (1)",
        "INSERT INTO repositories (name, url, image, created_at)
         VALUES ('app', 'http://127.0.0.1:7070/forge/app.git', 'i', 1), ('lib', 'http://h/lib.git', 'i', 1)",
        &format!(
            "INSERT INTO sessions (id, title, state, reason, repository, base, branch, agent, network, author_name,
             author_email, conversation, drive, base_commit, pushed_commit, created_at, last_activity)
             VALUES ('{id}', 't', 'idle', 'r', 'app', 'main', 'b', 'claude', 'none', 'a', 'e', 'c', '', 'x', 'y', 1, 1)"
        ),
        &format!("INSERT INTO pulls (session, repository, number, pull, updated_at) VALUES ('{id}', 'app', 4, '{json}', 1)"),
    ] {
        kept.sql(sql).await;
    }
    let store = kept.store().await;
    let record = store.session_get(&id).await.unwrap();
    let checkout = &record.checkouts[0];
    assert_eq!((checkout.repository.as_str(), checkout.base.as_deref()), ("app", Some("main")));
    assert_eq!((checkout.base_commit.as_deref(), checkout.unreviewed()), (Some("x"), Some("y")));
    assert_eq!((record.session.pr_number, record.env.len()), (Some(4), 0));
    let urls: Vec<_> =
        store.repository_list().await.unwrap().into_iter().map(|one| one.url).collect();
    assert_eq!(urls, ["http://forge.harvest.internal/app.git", "http://h/lib.git"]);
    store.close().await;
}
