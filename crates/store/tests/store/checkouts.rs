//! Checkouts and pull requests of sessions, and filters of the session list.

use harvest_proto::{
    SessionId,
    api::{PullRequest, PullRequestState},
};
use harvest_store::{NewSession, SessionFilter, SessionKey, Write};

use crate::test_store::{NOW, TestStore, new_session, on_both};

on_both!(
    checkout_updates_affect_one_repository,
    each_repository_has_its_own_pull_request,
    leases_survive_failed_and_unrecorded_pushes,
    only_newest_push_without_answer_counts,
    merged_pull_requests_are_not_listed,
    repository_in_use_cannot_be_deleted,
    sessions_are_filtered_by_title_repository_key,
);

async fn checkout_updates_affect_one_repository(test: TestStore) {
    let session = test.session().await;
    let of = |repository: &str| repository.parse().unwrap();
    let facts = vec![
        Write::BaseCommit { repository: of("o/s"), commit: "b".into() },
        Write::DefaultBase { repository: of("o/s"), base: "main".parse().unwrap() },
        Write::DefaultBase { repository: of("o/s"), base: "other".parse().unwrap() },
        Write::Pushed { repository: of("o/r"), commit: "p".into() },
    ];
    test.commit(&session, facts).await.unwrap();
    let record = test.store.session_get(&session).await.unwrap();
    let [r, s] = &record.checkouts[..] else { panic!("{record:?}") };
    assert_eq!(
        (r.base.as_deref(), s.base.as_deref(), s.base_commit.as_deref()),
        (None, Some("main"), Some("b"))
    );
    assert_eq!((r.unreviewed(), s.unreviewed()), (Some("p"), None));
    test.commit(&session, vec![Write::Reviewed { repository: of("o/r"), commit: "p".into() }])
        .await
        .unwrap();
    assert_eq!(test.store.session_get(&session).await.unwrap().checkouts[0].unreviewed(), None);
}

async fn leases_survive_failed_and_unrecorded_pushes(test: TestStore) {
    let session = test.session().await;
    let of: harvest_proto::RepositoryName = "o/r".parse().unwrap();
    let begun = |new: &str, replaced: Option<&str>| Write::PushBegun {
        repository: of.clone(),
        old: replaced.unwrap_or("0000").into(),
        new: new.into(),
        replaces: replaced.is_some(),
    };
    let ended = |commit: &str, accepted| match accepted {
        true => Write::Pushed { repository: of.clone(), commit: commit.into() },
        false => Write::PushFailed { repository: of.clone(), commit: commit.into() },
    };
    let writes = vec![
        begun("first", None),
        ended("first", true),
        // Again, and refused: it was pushed nevertheless.
        begun("first", None),
        ended("first", false),
        begun("refused", None),
        ended("refused", false),
        begun("killed", Some("first")),
    ];
    test.commit(&session, writes).await.unwrap();
    for (commit, known) in [("first", true), ("refused", false), ("killed", true)] {
        assert_eq!(test.store.has_pushed(&session, &of, commit).await.unwrap(), known, "{commit}");
    }
    let other = "o/s".parse().unwrap();
    assert!(!test.store.has_pushed(&session, &other, "first").await.unwrap());
    assert!(!test.store.has_pushed(&SessionId::random(), &of, "first").await.unwrap());
    assert_eq!(test.store.replaced_commits(&session, &of).await.unwrap(), 1);
    assert_eq!(test.store.replaced_commits(&session, &other).await.unwrap(), 0);
}

async fn only_newest_push_without_answer_counts(test: TestStore) {
    let session = test.session().await;
    let of: harvest_proto::RepositoryName = "o/r".parse().unwrap();
    let own = async || {
        let mut own = Vec::new();
        for commit in ["first", "a", "b", "c", "d", "e"] {
            if test.store.has_pushed(&session, &of, commit).await.unwrap() {
                own.push(commit);
            }
        }
        own
    };
    let begin = async |old: &str, new: &str, replaces| {
        let (repository, old, new) = (of.clone(), old.to_owned(), new.to_owned());
        let begun = Write::PushBegun { repository, old, new, replaces };
        test.commit(&session, vec![begun]).await.unwrap();
    };
    let pushed = Write::Pushed { repository: of.clone(), commit: "first".into() };
    test.commit(&session, vec![pushed]).await.unwrap();
    // Broken off, one after the other.
    for commit in ["a", "b", "c"] {
        begin("0000", commit, false).await;
    }
    assert_eq!(own().await, ["first", "c"]);
    // The remote had taken it nevertheless: it stays the session's until it is replaced.
    begin("c", "d", false).await;
    assert_eq!(own().await, ["first", "c", "d"]);
    begin("c", "e", true).await;
    assert_eq!(own().await, ["first", "e"]);
    assert_eq!(test.store.replaced_commits(&session, &of).await.unwrap(), 1);
}

fn pull_request(number: u64) -> PullRequest {
    PullRequest {
        number,
        url: format!("http://forge/{number}"),
        title: "t".into(),
        body: String::new(),
        state: PullRequestState::Open,
        draft: false,
        branch: "b".parse().unwrap(),
        base: "main".parse().unwrap(),
        commit: "c".into(),
        evidence: None,
    }
}

async fn each_repository_has_its_own_pull_request(test: TestStore) {
    let session = test.session().await;
    for (repository, number) in [("o/s", 1), ("o/r", 2), ("o/s", 3)] {
        let write = Write::PullRequest {
            repository: repository.parse().unwrap(),
            pull_request: Box::new(pull_request(number)),
        };
        test.commit(&session, vec![write]).await.unwrap();
    }
    let shown = test.store.session_get(&session).await.unwrap().session;
    let numbers: Vec<_> =
        shown.repositories.iter().map(|one| one.pr.as_ref().unwrap().number).collect();
    assert_eq!((numbers, shown.pr_number), (vec![2, 3], Some(2)));
}

async fn merged_pull_requests_are_not_listed(test: TestStore) {
    let session = test.session().await;
    test.database
        .sql("INSERT INTO repositories (name, url, created_at) VALUES ('o/s', 'http://h/s', 1)")
        .await;
    let numbers = async |state| {
        let pull = PullRequest { state, ..pull_request(1) };
        let repository = "o/s".parse().unwrap();
        let write = Write::PullRequest { repository, pull_request: Box::new(pull) };
        test.commit(&session, vec![write]).await.unwrap();
        let listed = test.store.pull_requests_unmerged().await.unwrap();
        let shown = |one: harvest_store::StoredPullRequest| (one.url, one.pull_request.number);
        listed.into_iter().map(shown).collect::<Vec<_>>()
    };
    let expected = [("http://h/s".to_owned(), 1)];
    assert_eq!(numbers(PullRequestState::Open).await, expected);
    assert_eq!(numbers(PullRequestState::Closed).await, expected);
    assert_eq!(numbers(PullRequestState::Merged).await, []);
}

async fn repository_in_use_cannot_be_deleted(test: TestStore) {
    let session = test.session().await;
    test.database
        .sql("INSERT INTO repositories (name, url, image, created_at) VALUES ('o/s', 'http://h/s', 'i', 1)")
        .await;
    let name = "o/s".parse().unwrap();
    assert!(test.store.repository_delete(&name, NOW).await.is_err());
    test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    test.store.repository_delete(&name, NOW).await.unwrap();
}

async fn sessions_are_filtered_by_title_repository_key(test: TestStore) {
    let key = |owner: &str| SessionKey { owner: owner.into(), text: "k".into() };
    let new = NewSession {
        title: "Fix 100% of Äpfel_x".into(),
        key: Some(key("ada@example.org")),
        ..new_session()
    };
    let id = new.id.clone();
    test.store.session_insert_all(test.lease, vec![(new, Vec::new())]).await.unwrap();
    let bare = NewSession { checkouts: Vec::new(), ..new_session() };
    test.store.session_insert_all(test.lease, vec![(bare, Vec::new())]).await.unwrap();
    let found = async |filter: SessionFilter| -> Vec<SessionId> {
        let records = test.store.session_find(&filter, None, 10).await.unwrap().records;
        records.into_iter().map(|record| record.session.id).collect()
    };
    let title = |text: &str| SessionFilter { title: Some(text.into()), ..SessionFilter::default() };
    for text in ["fix", "100%", "X", "Äpfel_"] {
        assert_eq!(found(title(text)).await, std::slice::from_ref(&id), "{text}");
    }
    assert!(found(title("100_")).await.is_empty() && found(title("fix%of")).await.is_empty());
    let named = |name: &str| SessionFilter {
        repository: Some(name.parse().unwrap()),
        ..SessionFilter::default()
    };
    assert!(found(named("p/s")).await.is_empty());
    assert_eq!(found(named("o/s")).await, std::slice::from_ref(&id));
    assert_eq!(
        found(SessionFilter { key: Some(key("ada@example.org")), ..named("o/r") }).await,
        std::slice::from_ref(&id)
    );
    let prefix = |text: &str| SessionFilter {
        id_prefix: Some(text.into()),
        archived: Some(false),
        ..SessionFilter::default()
    };
    assert_eq!(found(prefix(&id.to_string()[..12])).await, std::slice::from_ref(&id));
    assert!(found(prefix("%")).await.is_empty() && found(prefix("ses\\")).await.is_empty());
    assert_eq!(test.store.session_by_key(&key("Ada@Example.org")).await.unwrap(), Some(id));
    let again = NewSession { key: Some(key("ada@example.org")), ..new_session() };
    assert!(
        test.store.session_insert_all(test.lease, vec![(again, Vec::new())]).await.is_err(),
        "a user's key is unique"
    );
    assert_eq!(test.store.session_by_key(&key("eve@example.org")).await.unwrap(), None);
    let other = NewSession { key: Some(key("eve@example.org")), ..new_session() };
    test.store.session_insert_all(test.lease, vec![(other, Vec::new())]).await.unwrap();
}
