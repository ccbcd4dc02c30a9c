//! Sessions that agents created.

use harvest_proto::{SessionId, event::Usage};
use harvest_store::{ChildCounts, Lineage, Write};

use crate::test_store::{NOW, TestStore, on_both};

on_both! {
    children_are_counted_below_their_root,
    sessions_of_one_root_share_their_usage,
}

async fn children_are_counted_below_their_root(test: TestStore) {
    let [root, child, grandchild] =
        [test.session().await, test.session().await, test.session().await];
    let below_root = Lineage { parent: root.clone(), root: root.clone() };
    let below_child = Lineage { parent: child.clone(), root: root.clone() };
    test.commit(&child, vec![Write::ChildOf(below_root.clone())]).await.unwrap();
    test.commit(&grandchild, vec![Write::ChildOf(below_child.clone())]).await.unwrap();
    assert_eq!(test.store.child_lineage(&root).await.unwrap(), None);
    assert_eq!(test.store.child_lineage(&child).await.unwrap(), Some(below_root));
    assert_eq!(test.store.child_lineage(&grandchild).await.unwrap(), Some(below_child));
    let counts = async || test.store.child_counts(&root).await.unwrap();
    assert_eq!(counts().await, ChildCounts { all: 2, active: 2 });
    test.store.session_delete(&grandchild, test.lease, Vec::new(), NOW).await.unwrap();
    assert_eq!(counts().await, ChildCounts { all: 1, active: 1 });
    let none = ChildCounts { all: 0, active: 0 };
    assert_eq!(test.store.child_counts(&child).await.unwrap(), none);
}

async fn sessions_of_one_root_share_their_usage(test: TestStore) {
    let [root, child, other] = [test.session().await, test.session().await, test.session().await];
    let lineage = Lineage { parent: root.clone(), root: root.clone() };
    test.commit(&child, vec![Write::ChildOf(lineage)]).await.unwrap();
    let used = |input_tokens, output_tokens| Usage {
        input_tokens,
        output_tokens,
        cache_write_tokens: 7,
        ..Usage::default()
    };
    for (session, usage) in [(&root, used(1, 2)), (&child, used(10, 20)), (&other, used(100, 0))] {
        test.commit(session, vec![Write::Usage(usage)]).await.unwrap();
    }
    let usage = async |session| test.store.root_usage(session).await.unwrap();
    let together = Usage { cache_write_tokens: 14, ..used(11, 22) };
    assert_eq!([usage(&root).await, usage(&child).await], [Some(together), Some(together)]);
    assert_eq!(usage(&other).await, Some(used(100, 0)));
    assert_eq!(usage(&SessionId::random()).await, None);
}
